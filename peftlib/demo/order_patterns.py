"""Sentence patterns of the demo's requests.

`[a|b]` in a pattern is a choice. Places in braces are filled with values:

==========  ====================================================
`{items}`   count and thing: `twelve blue mugs`, `a dozen eggs`
`{n}`       the count alone, `12` or `twelve`, with `{item}`
`{item}`    the thing alone: `blue mugs`
`{name}`    a person
`{date}`    a date: `March 4`, `4 March`, `the 4th of March`
`{event}`   an event: `budget review`, `lunch`
`{an}`      the event with its article: `a budget review`, `lunch`
`{at}`      place with preposition: `in Leeds`, `at Harbour Hall`
`{place}`   the place alone
==========  ====================================================

A capital in braces (`{Items}`) makes the first letter one, for values that
begin a sentence.
"""

from __future__ import annotations

ORDERS = (
  '[Please order|Order|Please get|Get|Buy] {items} for {name} [by|on] {date}.',
  "I'd like to order {items} for {name}, [delivery on|to arrive on|to arrive"
  ' by|due on] {date}.',
  '[Could|Can|Would] you [order|buy|get|find] {items} for {name} by {date}?',
  '[Could|Can|Will] you [send|ship|deliver|post] {items} to {name} [by|on]'
  ' {date}?',
  '{name} [needs|wants|would like|is asking for|has asked for|requested]'
  ' {items} by {date}.',
  'By {date}, {name} [needs|will need|wants|must have] {items}.',
  'On {date}[|,] please [send|ship|deliver|bring|post] {items} to {name}.',
  '[Send|Ship|Deliver|Post|Mail] {items} to {name} [on|by] {date}[|, please].',
  '[Place|Put in|Enter|Make] an order for {items}, [recipient|customer|name]'
  ' {name}, [due|delivery|date] {date}.',
  '[New order|Order|Purchase request|Order request]: {items}, [for|customer]'
  ' {name}, [due|deliver on|ship on|needed by] {date}.',
  '{Items} for {name} [by|on] {date}[|, please].',
  '{Items} to {name} [by|on] {date}[|, please].',
  "[We need|We'll need|We're going to need|We require] {items} for {name}"
  ' [by|on|no later than] {date}.',
  'My [customer|client|colleague|neighbour|friend|boss] {name} [wants|needs|'
  'would like|asked for] {items} by {date}.',
  '[It is|This is|This one is] for {name}: {items}, [due|needed|wanted] [on|'
  'by] {date}.',
  'The order for {name} is {items}, [due|arriving|going out|leaving] on'
  ' {date}.',
  '[Add|Note down|Write down|Record|Log] an order: {items} for {name},'
  ' [date|delivery|due] {date}.',
  '{name} here. [I need|I want|Please send me|Put me down for] {items}'
  ' by {date}.',
  '{name} here. [Could|Can] I get {items} by {date}?',
  "This is {name}. [I'd like|I need|Please reserve|I'm after] {items} [for|"
  'on|by] {date}.',
  "My name is {name} and [I'd like to buy|I'd like to order|I need|I want]"
  ' {items} for {date}.',
  '[Reserve|Set aside|Keep|Hold] {items} for {name}, [pickup|collection|to be'
  ' collected] on {date}.',
  '{name} will [pick up|collect|come for|fetch] {items} on {date}.',
  'Can {name} [get|have] {items} [by|on] {date}?',
  '[Item|Product]: {item}. [Quantity|Count|Number]: {n}. [Name|Customer]:'
  ' {name}. [Date|Delivery]: {date}.',
  '[Customer|Name|Client]: {name}, [item|product]: {item}, [quantity|amount]:'
  ' {n}, [date|due]: {date}.',
  'Order {item} for {name}, {n} of them, [by|for] {date}.',
  '{name} asked [me for|us for|whether we have] {items} [by|for] {date}.',
  '[I promised|We promised|I owe|We owe] {name} {items} by {date}.',
  'Please make sure {name} [gets|receives|has] {items} [by|on] {date}.',
  'For {date}, {name} [ordered|has ordered|wants|needs|chose] {items}.',
  'For {name}: {items} [on|by] {date}.',
  'We have [an order|a request] from {name} for {items}, [due|to go out on|'
  'for delivery on] {date}.',
  "[Don't forget|Remember|Reminder]: {items} for {name} [by|on] {date}.",
  'The delivery for {name} on {date} [is|will be] {items}.',
  "{name}'s order is {items}, [due|delivery|to be sent on] {date}.",
  'Please [sort out|arrange|prepare|organise|pack] {items} for {name} by'
  ' {date}.',
  'How about [sending|shipping|delivering] {items} to {name} on {date}?',
  "Let's [send|get|buy] {name} {items} [for|by|on] {date}.",
  '[Send|Bring|Get] {name} {items} [on|by] {date}[|, please].',
  '[Could|Can|Will] you [send|get|bring] {name} {items} by {date}?',
  'I [want|need|have] to order {item} for {name}: {n} in total, due {date}.',
  '{name} ordered {items} and [expects delivery on|wants delivery by] {date}.',
  '[Due|Needed by|Ship date|Deadline] {date}: {items} for {name}.',
  'On {date}, {name} is [expecting|getting|collecting|receiving] {items}.',
  'Is it possible to [get|have|order] {items} for {name} by {date}?',
  "I'm [ordering|buying|getting|paying for] {items} for {name}, delivery"
  ' [on|by] {date}.',
  'Would it be possible to send {name} {items} on {date}?',
  '[Need|Want|Looking for] {items} for {name} [by|on] {date}.',
  '{Date}: {items} for {name}.',
  '{name} - {items} - {date}',
  '{name}, {items}, {date}.',
  'Deliver to {name} on {date}: {items}.',
  "[We're|I'm] [sending|shipping|giving] {items} to {name} on {date}.",
  'I have {name} on the phone, asking for {items} by {date}.',
  '[Can|Could] I [order|get|have] {items}? The name is {name}, [the date is|'
  'for] {date}.',
  'How soon can you ship {items}? {name} [needs|wants] everything by {date}.',
  'It would be [great|good|nice] if {name} had {items} by {date}.',
  'Tell {name} that {items} will [arrive|come|be here] on {date}.',
  'The [customer|buyer|client] is {name}, the order is {items}, the date is'
  ' {date}.',
  'Please [book|register|confirm] {items} [for|under the name] {name} for'
  ' {date}.',
  'I was hoping to get {items} for {name} by {date}.',
  'When you go shopping, [get|buy] {items} for {name}; the date is {date}.',
)

EVENTS = (
  '[Schedule|Book|Plan|Set up|Arrange|Organise] {an} with {name} {at} on'
  ' {date}[|, please].',
  '[Could|Can|Would|Will] you [schedule|book|set up|plan|arrange] {an} with'
  ' {name} on {date} {at}?',
  '[I have|We have|I now have] {an} with {name} {at} on {date}.',
  "On {date}[|,] [I have|we have|there's|I'm having|we're planning] {an} with"
  ' {name} {at}.',
  '[Add|Enter|Put|Save|Write] {an} with {name} in my [calendar|diary]: {date},'
  ' {place}.',
  "[I'm|We're|I'll be] [meeting|seeing|joining] {name} for {an} {at} on"
  ' {date}.',
  '{name} and I [have|are having|are planning|agreed on|arranged|talked about]'
  ' {an} {at} on {date}.',
  '[Remind me of|Remember|Note down|Write down] the {event} with {name} {at}'
  ' on {date}.',
  '[New event|Event|Calendar|Appointment|New entry|To do]: {event} with'
  ' {name}, {place}, {date}.',
  '[Event|Title|What]: {event}. [With|Guest|Person|Who]: {name}. [Place|'
  'Location|Where]: {place}. [Date|When|Day]: {date}.',
  '[Date|When]: {date}. [Place|Where]: {place}. [Event|What]: {event}.'
  ' [With|Who]: {name}.',
  '{Event} with {name} {at} on {date}[|, please].',
  '{Event} {at} with {name}, {date}[|, please].',
  "Let's [have|do|plan|schedule|arrange] {an} with {name} {at} on {date}.",
  '{name} [wants|would like|has asked for|needs|proposed|is suggesting] {an}'
  ' {at} on {date}.',
  '{name} [invited|has invited|is inviting] [me|us] to {an} {at} on {date}.',
  "[We're|I'm] [going|invited|coming|off] to {an} with {name} {at} on {date}.",
  '[Block|Save|Mark] {date} for {an} with {name} {at}.',
  'Keep {date} [free|open|clear] for {an} with {name} {at}[|, please].',
  "[There's|There will be|There is going to be] {an} with {name} {at} on"
  ' {date}.',
  '[My|Our] {event} with {name} is {at} on {date}.',
  'The {event} with {name} [is|will be|takes place|happens|is planned] {at} on'
  ' {date}.',
  '[The|My] {event} {at} on {date} [is|will be] with {name}.',
  '{Date}: {event} with {name} {at}.',
  "{At}, on {date}, [I have|we have|I'm having|there will be] {an} with"
  ' {name}.',
  'For {date}, [book|plan|schedule|arrange] {an} with {name} {at}[|, please].',
  'Please [confirm|note|enter|register|add|save] {an} with {name} on {date}'
  ' {at}.',
  'Is {name} [free|available|coming|expected|ready] for {an} {at} on {date}?',
  '[Can|Could|Will] {name} [come to|join me for|attend|make it to] {an} {at}'
  ' on {date}?',
  'Ask {name} [to come to|to join me for|about] {an} {at} on {date}.',
  '[Invite|Ask] {name} to {an} {at} on {date}[|, please].',
  '[Tell|Remind] {name} the {event} is {at} on {date}.',
  "I [promised|told|assured] {name} I'd be {at} for {an} on {date}.",
  'I [need|have|want|would like] to [meet|see] {name} {at} on {date} for {an}.',
  'Meet {name} {at} on {date} for {an}[|, please].',
  '[See|Meet|Join] {name} for {an}, {place}, {date}.',
  '{name}, {event}, {place}, {date}[|, please].',
  '{Event} - {name} - {place} - {date}',
  '{Event}, {name}, {date}, {place}.',
  '[We are|I am] counting on {name} for the {event} {at} on {date}.',
  'Is the {event} with {name} [still on|confirmed] for {date} {at}?',
  "[We'll|We will|We're going to] [hold|have|do] the {event} with {name} {at}"
  ' on {date}.',
  '{name} is [hosting|planning|running|holding|organising|giving] {an} {at} on'
  ' {date}.',
  '{name} is [coming to|attending|looking forward to|preparing] {an} {at} on'
  ' {date}.',
  '[It is|This is] about the {event} with {name}: {date}, {place}.',
  "[I'll be|We'll be|I have to be|I should be] {at} on {date} for {an} with"
  ' {name}.',
  "[We're|I'm] [meeting|seeing] {name} {at} for {an} on {date}.",
  'Make [time|room|space] for {an} with {name} on {date} {at}.',
  '[How about|What about|Is it too late for] {an} with {name} {at} on {date}?',
  '[Set|Put] {date} aside for {an} {at} with {name}[|, please].',
  'Put [me|us] down for {an} with {name} {at} on {date}.',
  '[Calendar entry|Diary entry|Entry]: {date}, {event}, {name}, {place}.',
  '{name} - {date} - {event} {at}',
  '[My|Our] next {event} is with {name} on {date} {at}.',
  '[Reserve|Keep] {date} for {name}: {event} {at}.',
  '[Can|Could] we [fit in|do|have|squeeze in] {an} with {name} {at} on {date}?',
  'On {date}, {name} [and I have|joins us for|is here for|takes me to|will'
  ' lead] {an} {at}.',
  '{name} [will|should|has to|wants to] be {at} on {date} for {an}.',
  "[I want|I'd like|I need|We want] {an} with {name} on {date}, {place}.",
  '[Got|Have|Having|Need] {an} with {name} on {date} {at}.',
  "[Don't forget|Reminder|Just a reminder]: {an} with {name}, {date}, {place}.",
  'We [agreed|decided|settled] on {date} for the {event}; {name} will be'
  ' waiting {at}.',
  'The {event} is on {date}, the place is {place}, and {name} is'
  ' [coming|invited|in charge].',
  '[I was hoping|We were hoping|I hope|I plan] to have {an} with {name} {at} on'
  ' {date}.',
  'When {name} is {at} on {date}, [we will have|we can do|we are having] {an}.',
  'It would be [great|good|nice|lovely] to have {an} with {name} {at} on'
  ' {date}.',
  'Who is [bringing|taking|driving|inviting] {name} to the {event} {at} on'
  ' {date}?',
  '[Please make sure|Make sure] {name} knows about the {event} {at} on {date}.',
  "{name} [can't wait for|won't miss|asked about|confirmed] the {event} {at} on"
  ' {date}.',
  "[I've|We've] [booked|planned|arranged|organised] {an} with {name} {at} for"
  ' {date}.',
  '[My boss|My sister|My friend|My neighbour] {name} is having {an} {at} on'
  ' {date}.',
)

HELD_OUT_ORDERS = (
  "I'm writing to request {items} on behalf of {name}, with delivery on"
  ' {date}.',
  'Do you have {items} in stock for {name}? The deadline is {date}.',
  '{name} has run out and needs {items} by {date}.',
  'Could {items} be delivered to {name} on {date}?',
  'Schedule a delivery of {items} to {name} for {date}.',
  'Ask the warehouse to pack {items} for {name}, leaving on {date}.',
  '{Items} should reach {name} by {date}.',
  'If possible, let {name} have {items} by {date}.',
  'We got a call from {name}, who wants {items} on {date}.',
  "I'd be grateful if {name} received {items} by {date}.",
  "There's a party on {date}, so order {items} for {name}.",
  'The deadline is {date} and the order is {items} for {name}.',
  'Another request came in: {name} is after {items} for {date}.',
  'What {name} needs is {items}, and the date is {date}.',
  'Purchase {items}; the buyer is {name} and delivery is {date}.',
  'Mark {items} as sold to {name}, handover on {date}.',
  'Kindly dispatch {items} so that {name} has them on {date}.',
  'As agreed, {name} gets {items} from us on {date}.',
  'Make it {items} for {name}, and have everything there by {date}.',
  'Charge {items} to {name} and set delivery for {date}.',
  'Have {items} ready for {name} on {date}.',
  'Our courier will take {items} to {name} on {date}.',
  "We're expected to supply {name} with {items} by {date}.",
  'Following up on the order from {name}: {items}, promised for {date}.',
)

HELD_OUT_EVENTS = (
  "Could you let {name} know that we're having {an} {at} on {date}?",
  'Pencil in {an} with {name} for {date}, location {place}.',
  '{name} just rang about {an} {at}, and {date} works for me.',
  "I'm looking forward to {an} with {name}, which is {at} on {date}.",
  'Does {date} suit {name} for {an} {at}?',
  "Nothing else on {date}, please: I've got {an} {at} with {name}.",
  "I'd like {name} to be there for {an} {at} on {date}.",
  'We moved the {event} with {name} to {date}; it will be {at}.',
  'Get {name} and me together {at} on {date} for {an}.',
  'The plan for {date} is {an} {at}, together with {name}.',
  'My assistant set up {an} {at}; {name} will be there on {date}.',
  '{name} suggested {date} for {an} {at}.',
  "Since {name} is {at} on {date}, let's use the day for {an}.",
  'Mark my diary: {name} expects me {at} for {an} on {date}.',
  "Have I told you about {an} with {name}? It's {at} on {date}.",
  'Looks like {an} {at} for {name} and me on {date}.',
  'Please find a slot on {date} when {name} and I can have {an} {at}.',
  "Whatever happens on {date}, I can't miss {an} with {name} {at}.",
  'All being well, {name} and I will be {at} for {an} on {date}.',
  'Send {name} an invitation to {an} on {date}, to be held {at}.',
  'I could do {an} with {name} on {date} if we meet {at}.',
  'Let reception {at} know that {name} is due on {date} for {an}.',
  '{name} is driving over for {an} {at} on {date}.',
  'They put {name} and me on the list for {an} {at}, {date}.',
)
