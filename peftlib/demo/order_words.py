"""Words that the demo's requests are made of.

Each kind of value has words for training and words that only held-out rows
use. A compound value (`oak stool`, `Mara Thornbury`) is made of words of one
side alone, so that a held-out value shares no word of its kind with training.
"""

from __future__ import annotations

import dataclasses

MONTHS = (
  'January',
  'February',
  'March',
  'April',
  'May',
  'June',
  'July',
  'August',
  'September',
  'October',
  'November',
  'December',
)
DAYS_IN_MONTH = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_ONES = (
  'zero one two three four five six seven eight nine ten eleven twelve'
  ' thirteen fourteen fifteen sixteen seventeen eighteen nineteen'
).split()
_TENS = 'twenty thirty forty fifty sixty seventy eighty ninety'.split()

# Nouns whose plural isn't spelled by rule.
_PLURALS = {
  'bookshelf': 'bookshelves',
  'knife': 'knives',
  'loaf': 'loaves',
  'scarf': 'scarves',
  'shelf': 'shelves',
}


@dataclasses.dataclass(frozen=True)
class Words:
  """The words of one side, training or held-out.

  Attributes:
    first_names: given names.
    last_names: family names.
    name_stems: beginnings of further family names.
    name_endings: their endings.
    adjectives: what may stand before an item.
    items: things to order that adjectives go with, in the singular.
    foods: things to order that stand alone, in the singular.
    containers: what dry goods come in, in the singular.
    contents: dry goods.
    vessels: what liquids come in, in the singular.
    liquids: liquids.
    towns: places that one is in.
    town_stems: beginnings of further towns.
    town_endings: their endings.
    venue_names: first words of places that one is at.
    venues: their last words.
    plain_events: events that take no article.
    topics: what work meetings are about.
    meetings: kinds of work meetings.
    subjects: what is learnt.
    lessons: how it is learnt.
  """

  first_names: tuple[str, ...]
  last_names: tuple[str, ...]
  name_stems: tuple[str, ...]
  name_endings: tuple[str, ...]
  adjectives: tuple[str, ...]
  items: tuple[str, ...]
  foods: tuple[str, ...]
  containers: tuple[str, ...]
  contents: tuple[str, ...]
  vessels: tuple[str, ...]
  liquids: tuple[str, ...]
  towns: tuple[str, ...]
  town_stems: tuple[str, ...]
  town_endings: tuple[str, ...]
  venue_names: tuple[str, ...]
  venues: tuple[str, ...]
  plain_events: tuple[str, ...]
  topics: tuple[str, ...]
  meetings: tuple[str, ...]
  subjects: tuple[str, ...]
  lessons: tuple[str, ...]


def number_word(number: int) -> str:
  """A number from 0 to 99 in words, such as `twenty-three`.

  Args:
    number: the number.

  Returns:
    Its words.

  Raises:
    ValueError: it is out of that range.
  """
  if not 0 <= number <= 99:
    raise ValueError(f'number is {number}; expected 0 to 99')
  if number < 20:
    return _ONES[number]
  tens, ones = divmod(number, 10)
  return _TENS[tens - 2] + (f'-{_ONES[ones]}' if ones else '')


def ordinal(number: int) -> str:
  """A day of the month with its ending, such as `22nd`.

  Args:
    number: the number.

  Returns:
    Its digits and ending.
  """
  if number % 100 in (11, 12, 13):
    return f'{number}th'
  return f'{number}{ {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") }'


def plural(noun: str) -> str:
  """The plural of a noun of these lists, such as `boxes of tea`.

  Args:
    noun: a noun in the singular, adjectives before it and `of` after it
      allowed.

  Returns:
    The plural.
  """
  head, of, rest = noun.partition(' of ')
  before, space, last = head.rpartition(' ')
  if last in _PLURALS:
    last = _PLURALS[last]
  elif last.endswith(('s', 'x', 'ch', 'sh')):
    last += 'es'
  elif last.endswith('y') and last[-2] not in 'aeiou':
    last = last[:-1] + 'ies'
  else:
    last += 's'
  return before + space + last + of + rest


def with_article(noun: str) -> str:
  """A noun of these lists with `a` or `an` before it.

  Args:
    noun: a noun in the singular.

  Returns:
    Article and noun.
  """
  return f'{"an" if noun[0] in "aeiou" else "a"} {noun}'


def _split(text: str, separator: str | None = None) -> tuple[str, ...]:
  return tuple(' '.join(w.split()) for w in text.split(separator))


TRAIN = Words(
  first_names=_split(
    'Mara Omar Lena Victor Priya Daniel Sofia Marcus Ingrid Tomas Amara Felix'
    ' Nadia Hugo Yuki Elena Rashid Clara Jonas Fatima Peter Leila Oscar Hana'
    ' Simon Carmen Arthur Mei Gustav Ruth Ahmed Julia Pedro Astrid Kwame Laura'
    ' Ivan Rosa Samuel Zara Martin Alice Diego Naomi Erik Olga Rafael Emma'
    ' Chen Judith Malik Teresa Adam Sabine Luis Miriam Otto Helen Tariq Vera'
    ' Benjamin Chiara Andrew Lucia Emeka Martha Stefan Anjali George Ines'
    ' Dmitri Paula Hassan Nora Charles Keiko Bruno Sarah Anton Layla Walter'
    ' Monica Ravi Joanna Patrick Sana Klaus Grace Mateo Irene Viktor Dalia'
    ' Francis Ewa Idris Philippa Leo Thandi Roland Susan Akira Beatrice Pavel'
    ' Amina Edward Marta Nikhil Greta Lars Rebecca Jamal Valerie Emil Tessa'
    ' Karim Dorothy Andre Selma Robert Aisha Paul Linda Hector Freya Anil'
    ' Christine Milan Eva Joseph Wanda Abdul Louise Sergei Gloria Henry Nina'
    ' Tobias Esther Lorenzo Maya Frank Ayesha Julian Petra Winston Bianca'
    ' Goran Rachel Marco Sylvia Alan Yasmin Theo Carla Ben Rita Sam Kim Pat'
    ' Joe Ann Ian Tim Max'
  ),
  last_names=_split(
    'Lindqvist Haddad Novak Okafor Moreau Tanaka Berg Castillo Singh Weber'
    ' Rossi Kowalski Mensah Larsen Petrov Nguyen Silva Murphy Schmidt Ali'
    ' Fischer Gomez Park Dubois Ivanova Campbell Yilmaz Andersen Costa Cohen'
    ' Sharma Jansen Reyes Turner Horvat Suzuki Hughes Farouk Bauer Mendez'
    ' Olsen Chowdhury Baker Romano Kim Laurent Adeyemi Walsh Popescu Hansen'
    ' Vargas Khan Meyer Bennett Sato Lopez Nilsson Dvorak Stewart Ferrari'
    ' Torres Wright Kaya Lehmann Osei Gupta Morris Santos Keller Virtanen'
    ' Delgado Cooper Hoang Marino Schwartz Fraser Rahman Nowak Ortega Wood'
    ' Peeters Iqbal Hill Marques Lund Cruz Watson Chen Demir Vogel Price'
    ' Kumar Brennan Aguilar Toth Evans Mbeki Ricci Gray Sanchez Koch Bell'
    ' Diaz Eriksen Foster Yamada Soto Hayes Weiss Perry Flores Bondar'
  ),
  name_stems=_split(
    'Ash Brad Black Brook Cran Dal El Fair Green Hart Hol Lang Mar North Old'
    ' Pem Red Rush Sel Stan Strat Thorn Wal West White Win Wool'
  ),
  name_endings=_split(
    'bury by combe dale den field ford ham land ley man more ridge ster ton'
    ' wick worth'
  ),
  adjectives=_split(
    'red blue green yellow black white grey brown purple orange silver golden'
    ' large small big round square light heavy new cheap plain striped spotted'
    ' simple fancy spare standard handmade second-hand'
  ),
  items=_split(
    'mug, candle, lamp, chair, notebook, pencil, umbrella, basket, blanket,'
    ' cushion, curtain, bottle, plate, bowl, spoon, fork, knife, scarf, hat,'
    ' glove, jacket, shirt, towel, pillow, mirror, clock, vase, frame, rug,'
    ' table, desk, shelf, drawer, box, bag, backpack, suitcase, wallet, belt,'
    ' watch, ring, necklace, brush, comb, sponge, bucket, broom, ladder,'
    ' hammer, screwdriver, tile, rope, chain, lock, key, bell, drum, guitar,'
    ' violin, flute, kite, ball, puzzle, doll, toy car, teddy bear, rose bush,'
    ' flower pot, garden chair, picnic table, printer, keyboard, monitor,'
    ' cable, charger, battery, phone case, tablet, camera, tripod, speaker,'
    ' microphone, envelope, folder, stapler, marker, calendar, poster, ticket,'
    ' badge, apron, tent, sleeping bag, torch, compass, bicycle, helmet, tyre,'
    ' pump, paddle, fishing rod, tennis racket, football, skateboard, sofa,'
    ' bench, carpet, coat, jumper, boot, purse, parcel, whistle, toolbox',
    ',',
  ),
  foods=_split(
    'apple, pear, melon, lemon, onion, carrot, pumpkin, cake, pie, muffin,'
    ' cookie, sandwich, pizza, bagel, loaf of bread, orange, banana, cucumber,'
    ' egg, burger, salad, doughnut, apple tart, cheese roll',
    ',',
  ),
  containers=_split('bag box crate packet sack carton'),
  contents=_split(
    'rice, flour, sugar, salt, tea, coffee, beans, nuts, raisins, apples,'
    ' oranges, cherries, sand, soil, seeds, screws, nails, chalk, soap,'
    ' washing powder, cereal, biscuits, charcoal, firewood',
    ',',
  ),
  vessels=_split('bottle jar tin can'),
  liquids=_split(
    'honey, milk, olive oil, vinegar, soup, paint, glue, lemon juice, cider,'
    ' ketchup, ink, shampoo',
    ',',
  ),
  towns=_split(
    'Leeds, Oslo, Lisbon, Boston, Prague, Dublin, Nairobi, Osaka, Denver,'
    ' Vienna, Bristol, Madrid, Cairo, Lyon, Toronto, Warsaw, Austin, Geneva,'
    ' Milan, Chicago, Hamburg, Porto, Seattle, Athens, Glasgow, Mumbai,'
    ' Brussels, Lima, Oxford, Dallas, Zurich, Bergen, Sydney, Paris, Turin,'
    ' Accra, Atlanta, Munich, Delhi, Cardiff, Rome, Phoenix, Berlin, Bogota,'
    ' York, Helsinki, Miami, Naples, Kyoto, Ghent, Quebec, Dakar, London,'
    ' Stockholm, Bath, Houston, Lagos, Krakow, Perth, Cologne, Detroit,'
    ' Seville, Riga, Tokyo, Norwich, Rotterdam, Santiago, Ottawa, Exeter,'
    ' Nice, Tampa, Sofia, Basel, Adelaide, Cork, Marseille, New York,'
    ' San Diego, Cape Town, Los Angeles',
    ',',
  ),
  town_stems=_split(
    'Alder Barn Bed Birken Chester Clay Darling Elm Fern Gold Hazel High Kings'
    ' Lamb Long Middle Mill New Oak Rock Sand Spring Stone Swin Taun Whit'
  ),
  town_endings=_split(
    'borough bridge burn church cliff don ford gate ham head hurst ley mouth'
    ' port stead ton well wood'
  ),
  venue_names=_split(
    'Maple Harbour Cedar Station Victoria River Castle Garden Union Market'
    ' Bridge Park Lion Crown Lake Hill Forest Central Liberty Sunrise Rose'
    ' Oak Pearl Eagle Royal Mill Ocean Tower Willow Swan'
  ),
  venues=_split(
    'Hall Cafe House Hotel Library School Museum Theatre Club Restaurant'
    ' Clinic Studio Centre College Church Gallery'
  ),
  plain_events=_split(
    'lunch, dinner, breakfast, coffee, tea, drinks, golf, tennis, training,'
    ' yoga, chess, dance practice, band practice, choir practice',
    ',',
  ),
  topics=_split(
    'budget, design, safety, hiring, sales, project, team, planning, product,'
    ' research, contract, client, staff, board, press, tax, travel, software,'
    ' strategy, quarterly, weekly, monthly, annual, market, website, launch',
    ',',
  ),
  meetings=_split(
    'meeting, review, workshop, session, call, briefing, presentation, update',
    ',',
  ),
  subjects=_split(
    'piano, guitar, history, science, football, gardening, cooking, painting,'
    ' language, music, photography, film, swimming, writing, maths, drawing,'
    ' sewing, dance, singing, driving, judo, riding, first aid',
    ',',
  ),
  lessons=_split('lesson, class, course, exam, workshop, evening', ','),
)

HELD_OUT = Words(
  first_names=_split(
    'Sigrid Anwar Colette Magnus Deepa Reuben Paloma Kofi Harriet Stellan'
    ' Ludmila Farid Imogen Tadeo Noriko Callum Rosalind Yusuf Annika Dominic'
    ' Sunita Piotr Marisol Gareth Hiroshi Camille Ezra Zainab Leopold Bettina'
    ' Nelson Tamsin Arjun Viola Conrad Meera Fergus Odette Lydia'
  ),
  last_names=_split(
    'Abernathy Bergstrom Calloway Dimitriou Eklund Fitzgerald Goldberg'
    ' Hernandez Ishikawa Jablonski Karlsson Lombardi Macdonald Nakamura'
    ' Oyelaran Pellegrini Quintero Ramanathan Sorensen Takahashi Underhill'
    ' Valenzuela Wagner Zielinski Banerjee Duarte Gallagher Holm Kipkemboi'
    ' Mazur Ostrowski Prentice Rinaldi Sinclair Tran Vasquez Whitaker'
  ),
  name_stems=_split('Brough Cal Dray Farn Gains Lud Penn Rad Sedge Tarl Wex'),
  name_endings=_split('bourne cott grave hurst low thorpe'),
  adjectives=_split(
    'pink turquoise beige crimson navy tiny wide narrow oval sturdy antique'
    ' shiny padded checked elegant'
  ),
  items=_split(
    'teapot, saucer, kettle, armchair, stool, bookshelf, lantern, quilt,'
    ' doormat, tray, ladle, sandal, sweater, raincoat, bracelet, mop, wrench,'
    ' shovel, trumpet, harmonica, frisbee, bird cage, projector, headset,'
    ' router, binder, crayon, magnet, sticker, hammock, canoe, snorkel,'
    ' surfboard, dumbbell',
    ',',
  ),
  foods=_split(
    'peach, mango, cabbage, croissant, pancake, waffle, pineapple, pretzel',
    ',',
  ),
  containers=_split('tub pouch pallet bundle'),
  contents=_split(
    'lentils, oats, pepper, cocoa, plums, walnuts, gravel, pasta, almonds', ','
  ),
  vessels=_split('barrel jug flask'),
  liquids=_split('mustard, yoghurt, varnish, syrup, lemonade', ','),
  towns=_split(
    'Antwerp, Bilbao, Calgary, Dresden, Edinburgh, Florence, Gdansk, Hanoi,'
    ' Istanbul, Jakarta, Lausanne, Memphis, Nantes, Odense, Palermo, Reykjavik,'
    ' Salzburg, Tallinn, Utrecht, Valencia, Winnipeg, Zagreb, Baltimore,'
    ' Manchester, Nashville, Singapore, Buenos Aires, San Jose',
    ',',
  ),
  town_stems=_split('Amber Brock Crom Dun Gill Hather Ips Led Nor Pick Sher'),
  town_endings=_split('bury by combe dale field minster wick worth'),
  venue_names=_split(
    'Juniper Lantern Granite Meadow Sparrow Regent Falcon Orchard Beacon'
    ' Marina Plaza Heron Canal Abbey'
  ),
  venues=_split('Inn Bistro Arena Academy Pavilion Lounge Bakery Chapel'),
  plain_events=_split('brunch, supper, badminton, billiards, bowling', ','),
  topics=_split(
    'marketing, finance, charity, logistics, security, engineering, alumni,'
    ' merger, payroll, branding, outreach',
    ',',
  ),
  meetings=_split('conference, consultation, audit, debrief, summit', ','),
  subjects=_split(
    'pottery, harp, chemistry, poetry, fitness, rowing, ballet, geology',
    ',',
  ),
  lessons=_split('tutorial, rehearsal, seminar, demonstration', ','),
)
