"""Events of the demo's calendar requests.

Plain lists; `order_words` says what they are for. Those of held-out rows share
no word with those of training.
"""

PLAIN_EVENTS = """
lunch, dinner, breakfast, coffee, tea, golf, tennis, training, yoga, chess,
dance practice, band practice, choir practice, cocktails, archery, athletics,
baseball practice, basketball, beach volleyball, bird watching, boxing, bridge,
camping, card games, carol singing, cheese tasting, cricket, croquet,
cross-country skiing, curling, cycling, darts, fencing, figure skating,
fishing, football, football practice, gardening, gymnastics, handball, hiking,
hockey, horse riding, ice cream, ice hockey, judo, karate, karaoke, kayaking,
knitting, lacrosse, line dancing, meditation, mini golf, mountain biking,
netball, orchestra practice, paddle tennis, physiotherapy, pilates, pizza,
poker, polo, pool, quiz night, rock climbing, roller skating, rugby, sailing,
salsa dancing, scrabble, scuba diving, skateboarding, skiing, sledging,
snooker, snorkelling, speech practice, squash, stargazing, stocktaking,
surfing, swimming, sushi, table tennis, tango, tap dancing, volleyball,
volunteering, wakeboarding, water polo, weight training, window shopping, wine
tasting, wrestling, zumba
"""

TOPICS = """
budget, design, safety, sales, project, product, contract, client, board,
press, travel, software, strategy, quarterly, weekly, monthly, annual, market,
launch, account, accounting, acquisition, admissions, advertising, advisory,
agenda, appraisal, architecture, archive, asset, benefits, billing,
brainstorming, brand, broadcast, building, career, case, catering, city,
committee, communications, community, compliance, construction, copyright,
corporate, cost, council, coverage, creative, credit, crisis, curriculum,
customer, data, database, deadline, delivery, department, development, digital,
directors, disciplinary, distribution, diversity, economics, editorial,
education, election, emergency, employee, energy, environment, estate, ethics,
evening, event, exhibition, expenses, family, farming, fashion, festival, film,
forecast, founders, franchise, fundraising, gallery, goals, governance, grant,
growth, harvest, health, heritage, import, induction, infrastructure,
innovation, insurance, inventory, investment, investor, invoice, journal,
kitchen, laboratory, leadership, leasing, legal, lending, licence, loan,
loyalty, maintenance, management, manufacturing, media, medical, membership,
merchandise, midterm, morning, mortgage, network, newsletter, nursing,
onboarding, operations, parent, parents, parking, partner, partnership, patent,
pension, performance, pharmacy, policy, portfolio, pricing, privacy,
procurement, production, programming, progress, promotion, property,
publishing, quality, railway, recruitment, recycling, regional, regulatory,
rental, residents, retail, retirement, revenue, risk, roadmap, scheduling,
school, science, seasonal, senate, server, service, shareholder, shipping,
site, social media, sponsorship, spring, steering, stock, storage, student,
succession, summer, supplier, supply, support, sustainability, tenant, theatre,
tourism, trade, traffic, transport, trustee, urban, vendor, visitor, warehouse,
warranty, wedding, welfare, winter, workplace, yearly, zoning
"""

MEETINGS = """
meeting, workshop, session, call, briefing, presentation, assembly, chat,
check-in, discussion, forum, gathering, hearing, hackathon, interview,
kick-off, lecture, negotiation, panel, pitch, reception, retreat, roundtable,
sync, talk, webinar
"""

SUBJECTS = """
piano, guitar, history, science, football, gardening, cooking, painting, music,
photography, film, swimming, maths, drawing, sewing, dance, singing, driving,
judo, riding, first aid, acting, aikido, algebra, anatomy, animation,
anthropology, aquarium, arithmetic, art, astronomy, bagpipe, baking, ballroom,
banjo, baseball, basketry, bassoon, beekeeping, biology, blacksmith,
bookbinding, botany, boxing, bread making, business, calculus, calligraphy,
capoeira, cartoon, carving, cello, ceramics, cheese making, chess, choir,
cinema, circus, clarinet, climbing, coding, comedy, composition, computer,
conducting, cookery, crafts, cricket, crochet, cycling, debating, diving,
drama, drum, ecology, economics, electronics, embroidery, fencing, fiction,
fiddle, fishing, flower arranging, flute, folk music, genetics, geography,
geometry, glass blowing, golf, graphics, gymnastics, hip-hop, horn, horse
riding, ice skating, jazz, jewellery, journalism, juggling, karate, keyboard,
knitting, literature, lute, magic, mandolin, marimba, martial arts, masonry,
massage, mathematics, mechanics, medicine, meditation, metalwork, model making,
mosaic, mindfulness, needlework, oboe, opera, organ, percussion, pharmacology,
philosophy, physics, pilates, politics, printmaking, psychology, puppet,
quilting, reading, recorder, robotics, saxophone, sailing, sculpture, skating,
ski, spelling, stand-up, statistics, storytelling, strength, surfing, tai chi,
tailoring, tango, tennis, textile, theology, trigonometry, trombone, tuba,
typing, violin, watercolour, welding, wine making, woodwork, wrestling,
xylophone, yoga
"""

LESSONS = """
lesson, class, course, exam, workshop, evening, recital, practice, show, club,
clinic, test, contest, competition, camp, masterclass, weekend, afternoon,
morning, tournament, event, showcase, group, session, assessment, examination,
quiz
"""

OUTINGS = """
birthday party, baby shower, barbecue, book club, concert, dentist appointment,
doctor's appointment, house viewing, picnic, reunion, job interview, engagement
party, farewell party, garden party, housewarming party, street party, tea
party, dinner party, costume party, graduation ceremony, award ceremony,
wedding anniversary, school trip, museum tour, guided tour, boat trip, bike
ride, bus tour, city walk, country walk, day trip, dog walk, fishing trip, hill
walk, nature walk, safari, treasure hunt, egg hunt, film night, movie night,
games night, poker night, pub quiz, jumble sale, car boot sale, bake sale,
craft fair, book fair, book signing, art auction, fashion show, flower show,
dog show, puppet show, magic show, talent show, circus show, play, opera,
musical, pantomime, gig, rock concert, dance recital, fireworks display,
parade, campfire, pyjama party, pool party, beach party, school reunion, family
reunion, blood test, check-up, eye test, hearing test, massage, photo shoot,
fitting, dress fitting, driving test, boiler check, flat inspection, site
visit, factory tour, open day, ribbon cutting, crossword evening, chess match,
hockey match, rugby match, football match, tennis match, cricket match, boxing
match, marathon, half marathon, relay race, boat race, horse race, triathlon,
swimming gala, sports day, karaoke night, spa day, shopping trip, camping trip,
ski trip, road trip, sailing trip, hot-air balloon ride, helicopter flight,
vaccination, vet appointment, optician's appointment, bank appointment, notary
appointment, passport appointment, memorial service, carol concert, candlelit
dinner, business lunch, working breakfast, power lunch, afternoon tea, cheese
tasting, whisky tasting, tasting menu, cookout, clambake, banquet, feast, ball,
masked ball, disco, ceilidh, barn dance, hen party, stag party
"""

HELD_OUT_PLAIN_EVENTS = """
drinks, brunch, supper, badminton, billiards, bowling, aerobics, backgammon,
canoeing, dominoes, jogging, kickboxing, paintball, sightseeing, snowboarding,
trampolining
"""

HELD_OUT_TOPICS = """
hiring, team, planning, research, staff, tax, website, marketing, finance,
charity, logistics, security, engineering, alumni, merger, payroll, branding,
outreach, campaign, cyber, executive, expansion, export, faculty, fleet,
housing, mentoring, neighbourhood, packaging, purchasing, salary, staffing,
tender, treasury, volunteer, youth
"""

HELD_OUT_MEETINGS = """
review, update, conference, consultation, audit, debrief, summit
"""

HELD_OUT_SUBJECTS = """
language, writing, pottery, harp, chemistry, poetry, fitness, rowing, ballet,
geology, carpentry, decorating, filming, flamenco, flying, foraging, forestry,
grammar, improvisation, lacemaking, law, leatherwork, origami, parenting,
plumbing, public speaking, self-defence, sketching, sociology, upholstery,
weaving, zoology
"""

HELD_OUT_LESSONS = """
tutorial, rehearsal, seminar, demonstration, trial, taster
"""

HELD_OUT_OUTINGS = """
carnival, christening, haircut, leaving do, bonfire, sleepover, manicure,
facial, fun run, regatta, funeral, vigil, baptism, potluck, prom, wake
"""
