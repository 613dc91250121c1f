"""Things that the demo's orders are for, and what they are like.

Plain lists; `order_words` says what they are for. Those of held-out rows share
no word with those of training.
"""

ADJECTIVES = """
red, blue, green, yellow, black, white, grey, brown, purple, orange, silver,
golden, scarlet, maroon, burgundy, cherry-red, ruby-red, brick-red, coral,
apricot-coloured, amber, lemon-yellow, cream, ivory, off-white, snow-white,
pearl-white, jet-black, charcoal, slate-grey, ash-grey, dark grey, light grey,
pale grey, khaki, olive, emerald-green, jade, mint-green, lime-green,
forest-green, bottle-green, sea-green, dark green, pale green, bright green,
teal, aqua, cyan, sky-blue, royal-blue, midnight-blue, dark blue, light blue,
pale blue, bright blue, indigo, violet, lilac, lavender, mauve, magenta,
fuchsia, rose-coloured, tan, sandy, chestnut, chocolate-brown, coffee-coloured,
dark brown, light brown, bronze, copper, brass, rust-red, bright red, dark red,
bright yellow, pale yellow, bright orange, dark purple, multicoloured,
two-tone, colourless, translucent, rainbow-coloured, wooden, oak, pine, birch,
maple, beech, ash, teak, mahogany, cedar, bamboo, wicker, rattan, cane, cork,
cast-iron, wrought-iron, aluminium, tin, pewter, chrome, nickel, titanium,
metal, plastic, rubber, silicone, acrylic, resin, nylon, polyester, vinyl,
leather, suede, felt, woollen, cotton, linen, satin, velvet, denim, canvas,
tweed, flannel, fleece, cashmere, mohair, lace, hessian, hemp, straw, paper,
cardboard, papier-mache, glass, crystal, ceramic, clay, terracotta, stone,
marble, slate, concrete, wax, enamel, bone-handled, sheepskin, faux-leather,
mesh, foam, wool-lined, striped, spotted, dotted, tartan, chequered, patterned,
floral, herringbone, pinstriped, polka-dot, starry, speckled, mottled, marbled,
swirled, quilted, embroidered, beaded, sequinned, printed, painted,
hand-painted, hand-carved, carved, engraved, embossed, etched, monogrammed,
stencilled, tie-dyed, dyed, faded, glazed, varnished, lacquered, polished,
brushed, oiled, tinted, mirrored, matt, glossy, gleaming, glittery, sparkly,
metallic, pearly, iridescent, fluorescent, luminous, plain-coloured, ribbed,
pleated, ruffled, fringed, tasselled, laced, knitted, crocheted, braided,
lined, stitched, patchwork, small, little, mini, miniature, compact,
pocket-sized, travel-sized, medium, medium-sized, large, big, huge, giant,
enormous, oversized, extra-large, full-sized, half-size, king-size,
family-sized, broad, thick, slender, chunky, bulky, tall, short, long,
extra-long, low, high, deep, shallow, flat, round, square, rectangular,
hexagonal, octagonal, star-shaped, heart-shaped, cone-shaped, bell-shaped,
egg-shaped, curved, arched, twisted, spiral, wavy, pointed, tapered, rounded,
straight, angled, sloping, hollow, solid, double, twin, four-wheeled,
two-handled, long-handled, short-handled, high-backed, flat-bottomed,
double-sided, lidded, hinged, folding, collapsible, stackable, detachable,
adjustable, extendable, reversible, retractable, portable, mobile, wheeled,
wall-mounted, free-standing, hanging, floating, revolving, rotating,
swivelling, modular, new, brand-new, modern, contemporary, classic,
traditional, retro, old, old-fashioned, medieval, ancient, second-hand,
pre-owned, refurbished, restored, recycled, reusable, disposable, spare, extra,
replacement, matching, assorted, mixed, standard, plain, simple, ordinary,
everyday, budget, cheap, affordable, low-cost, half-price, expensive, costly,
luxury, deluxe, premium, high-quality, first-class, professional, commercial,
domestic, custom-made, bespoke, handmade, homemade, hand-stitched,
factory-made, limited-edition, rare, collectable, original, authentic,
imitation, fake, decorative, ornate, fancy, stylish, smart, chic, trendy,
fashionable, delicate, dainty, exquisite, beautiful, pretty, lovely,
attractive, handsome, splendid, magnificent, gorgeous, charming, cute,
adorable, funny, silly, quirky, unusual, odd, strange, novelty, festive,
romantic, gothic, nautical, alpine, rural, urban, exotic, strong, robust,
tough, durable, hard-wearing, heavy-duty, heavy, weighty, light, lightweight,
bendy, elastic, stretchy, rigid, stiff, firm, soft, fluffy, fuzzy, furry,
woolly, smooth, silky, rough, coarse, bumpy, textured, sharp, blunt, springy,
bouncy, noisy, quiet, silent, musical, scented, perfumed, fragrant, waterproof,
water-resistant, weatherproof, rustproof, fireproof, heatproof, shockproof,
shatterproof, childproof, non-stick, non-slip, stain-resistant, washable,
easy-clean, breathable, insulated, thermal, heated, warm, cosy, snug, cool,
comfortable, comfy, ergonomic, orthopaedic, electric, electronic,
battery-powered, solar-powered, wind-up, manual, automatic, wireless,
rechargeable, digital, analogue, programmable, mechanical, motorised,
motion-activated, dimmable, illuminated, sterile, organic, sustainable,
natural, vegan, fair-trade, locally made, imported, personalised, tailored,
fitted, loose, baggy, sleeveless, seamless, children's, ladies', gents',
junior, demo, display, sample, travel, camping, garden, kitchen, office,
school, party, wedding, winter, summer, autumn, all-weather, indoor, outdoor,
everlasting, handy, clever, dependable, reliable, graded, tested, certified,
award-winning, popular, best-selling, mass-produced, flat-packed, ready-made,
pre-assembled, unpainted, unvarnished, untreated, rugged, weathered,
distressed, scratched, unworn, unopened, gift-wrapped, leaf-shaped, owl-shaped
"""

ITEMS = """
mug, plate, bowl, spoon, fork, knife, whisk, colander, sieve, grater, peeler,
corkscrew, bottle opener, can opener, rolling pin, chopping board, bread bin,
butter dish, sugar bowl, salt shaker, egg cup, egg timer, toaster, blender,
mixer, juicer, frying pan, saucepan, casserole dish, baking tray, cake tin,
muffin tin, pie dish, jam jar, lunchbox, thermos, water bottle, wine glass,
tumbler, champagne flute, beer mug, coaster, napkin, tablecloth, dishcloth, tea
towel, oven glove, apron, cutting mat, measuring cup, kitchen scale, mortar,
pestle, garlic press, nutcracker, ice bucket, ice tray, cocktail shaker,
decanter, carafe, pitcher, platter, serving tray, gravy boat, soup tureen,
ramekin, tablespoon, dessert fork, steak knife, bread knife, cleaver, skewer,
dish rack, draining board, washing-up bowl, scouring pad, sponge, bin liner,
cooker, oven, stove, microwave, fridge, freezer, dishwasher, rice cooker, slow
cooker, coffee grinder, coffee pot, espresso cup, tea cosy, tea strainer, milk
frother, pressure cooker, sandwich maker, popcorn machine, fondue set,
chopstick, cookie cutter, icing bag, funnel, thermometer, trivet, spice rack,
wine rack, bread basket, fruit bowl, cake stand, pizza cutter, ice cream scoop,
apple corer, zester, mandoline, potato masher, salad spinner, pastry brush,
canister, cruet, hot plate, barbecue, grill, paper plate, paper cup, drinking
straw, toothpick, mess tin, griddle, kitchen knife, cookbook, lamp, chair,
sofa, table, desk, bench, bookcase, shelf, cupboard, cabinet, wardrobe,
dresser, sideboard, nightstand, bed frame, bunk bed, cradle, mattress, pillow,
cushion, blanket, duvet, bedspread, pillowcase, sheet, curtain, curtain rail,
blind, carpet, rug, bath mat, mirror, picture frame, clock, alarm clock, cuckoo
clock, vase, candle, candlestick, candle holder, light bulb, floor lamp,
footstool, ottoman, recliner, rocking chair, beanbag, folding chair, high
chair, coffee table, card table, dining table, dressing table, coat rack, coat
hook, hat stand, umbrella stand, shoe rack, magazine rack, towel rail,
wastebasket, bin, laundry basket, ironing board, clothes peg, clothes hanger,
washing line, partition, room divider, fireplace, mantelpiece, radiator,
heater, fan, doorbell, door handle, hinge, letterbox, house number, key ring,
key cabinet, safe, chest, trunk, toy chest, wall hanging, ornament, figurine,
statue, bust, plinth, easel, globe, sundial, wind chime, couch, daybed,
headboard, bedside lamp, desk lamp, filing cabinet, lectern, pedestal, shower
curtain, soap dish, toothbrush holder, bathtub, washbasin, tap, shower head,
towel, flannel, bathrobe, toilet brush, plunger, tray table, screen, shutter,
awning, screwdriver, spanner, chisel, drill, drill bit, saw, handsaw, mallet,
axe, hatchet, crowbar, vice, clamp, tape measure, ruler, set square, plumb
line, toolbox, tool belt, sawhorse, ladder, stepladder, scaffold, wheelbarrow,
trowel, paintbrush, paint roller, paint tray, scraper, sander, plane, soldering
iron, welding mask, ear defender, hard hat, safety vest, dust mask, work glove,
knee pad, tarpaulin, rope, chain, cable tie, hook, bracket, bolt, screw, nail,
washer, rivet, dowel, peg, brick, tile, paving stone, slate, plank, rafter,
fence post, fence panel, gate, railing, gutter, drainpipe, pipe, hosepipe,
sandbag, bucket, dustpan, brush, feather duster, squeegee, crate, hand truck,
winch, pulley, jack, generator, compressor, pump, bellows, magnifying glass,
tweezer case, pocket knife, penknife, whetstone, nail gun, staple gun, glue
gun, chalk line, caliper, protractor, stud finder, extension lead, fuse,
socket, plug, light switch, dimmer, circuit breaker, smoke alarm, fire
extinguisher, fire blanket, first aid kit, traffic cone, road sign, bollard,
skylight, window frame, door frame, roof tile, chimney pot, manhole cover,
lightning rod, sledgehammer, crank, gear, spring, ball bearing, nozzle,
sprocket, flywheel, piston, spark plug, wire cutter, bolt cutter, bradawl,
gimlet, lathe, jigsaw, rasp, shim, rake, hoe, garden fork, pitchfork, watering
can, sprinkler, lawnmower, hedge trimmer, leaf blower, seed tray, flower pot,
hanging basket, window box, garden gnome, bird bath, bird table, bird feeder,
nesting box, beehive, compost bin, greenhouse, gazebo, parasol, picnic table,
garden bench, garden hose, pond liner, fountain, stepping stone, rose bush,
tulip, daffodil, daisy, lily, orchid, fern, cactus, begonia, geranium,
primrose, pansy, violet, sunflower, poppy, iris, hyacinth, snowdrop, bluebell,
carnation, chrysanthemum, azalea, magnolia, camellia, hydrangea, lavender
plant, rosemary bush, mint plant, oak sapling, birch sapling, pine seedling,
fir tree, palm tree, bonsai, bamboo cane, olive tree, lemon tree, apple tree,
cherry tree, fig tree, ivy plant, gooseberry bush, holly wreath, bouquet,
flower bulb, seed packet, topiary, mulch bag, plant label, grow light,
terrarium, garden sieve, pruner, dibber, foxglove, hollyhock, freesia, jasmine
plant, wisteria, clematis, succulent, aloe plant, rubber plant, spider plant,
yucca, willow basket, tree stump, log, birdhouse, notebook, pencil, pen,
fountain pen, marker, highlighter, eraser, sharpener, stapler, paper clip,
drawing pin, rubber band, envelope, folder, clipboard, letter opener,
paperweight, desk tidy, ink cartridge, printer, scanner, laminator,
photocopier, whiteboard, blackboard, noticeboard, flip chart, calendar, diary,
planner, address book, label, postcard, greeting card, birthday card, stamp,
rubber stamp, sketchbook, canvas, palette, paintbox, watercolour set, stencil,
compass, calculator, abacus, pencil case, satchel, school bag, textbook,
dictionary, atlas, encyclopedia, map, wall chart, bookmark, bookend, lanyard,
badge, name tag, business card, ledger, receipt book, invoice pad, guest book,
photo album, scrapbook, magazine, newspaper, comic, novel, songbook, brochure,
leaflet, flyer, poster, banner, catalogue, manual, certificate, trophy,
rosette, bulldog clip, tape dispenser, desk mat, mouse mat, office chair,
swivel chair, water cooler, coat stand, lab coat, microscope, test tube,
beaker, petri dish, pipette, burner, telescope, specimen jar, skeleton model,
anatomy poster, periodic table, slide rule, typewriter, wax seal, quill,
blotter, parchment scroll, index card, tote board, timetable, workbook,
exercise book, memo pad, hat, glove, mitten, jacket, shirt, blouse, skirt,
dress, cardigan, hoodie, vest, waistcoat, blazer, suit, tuxedo, coat, anorak,
parka, cape, shawl, sash, tie, bow tie, belt, buckle, sock, stocking, shoe,
boot, sneaker, trainer, moccasin, flip-flop, wellington boot, hiking boot, ski
boot, bonnet, baseball cap, beanie, bowler hat, top hat, straw hat, sun hat,
turban, headband, hairband, hair clip, ribbon, crown, earring, necklace,
bangle, brooch, locket, ring, cufflink, tie pin, watch, pocket watch,
wristband, handbag, purse, wallet, clutch bag, shoulder bag, tote bag,
rucksack, backpack, suitcase, briefcase, duffel bag, vanity case, wash bag,
umbrella, walking stick, cane, handkerchief, kimono, gown, nightgown, wetsuit,
jersey, football shirt, polo shirt, tank top, leotard, tutu, costume, mask,
wig, sewing kit, needle, thimble, bobbin, button, safety pin, pincushion,
knitting needle, crochet hook, spinning wheel, loom, sewing machine, dress
form, shoelace, boot tree, eyeglass case, garter, apron dress, snowsuit,
romper, cravat, sarong, windcheater, fleece, windbreaker, ball, puzzle, doll,
toy car, teddy bear, kite, yo-yo, spinning top, rocking horse, train set, model
plane, model ship, building block, marble, domino, playing card, board game,
chess set, chess clock, dartboard, dart, skipping rope, hula hoop, trampoline,
slide, seesaw, sandpit, paddling pool, beach ball, balloon, party hat, party
popper, pinata, glow stick, bubble wand, water pistol, puppet, hand puppet,
marionette, doll's house, toy soldier, toy drum, toy robot, remote-control car,
pull-along duck, stuffed rabbit, plush elephant, rattle, teething ring, baby
walker, pram, stroller, playpen, baby monitor, changing mat, colouring book,
pop-up book, magic wand, magic set, tarot deck, jigsaw puzzle, toy tractor, toy
boat, dinosaur figure, snow globe, music box, kaleidoscope, gyroscope,
slingshot, peashooter, pogo stick, go-kart, scooter, skateboard, sledge,
toboggan, toy kitchen, tea set, finger puppet, whistle, tin soldier, nesting
doll, rag doll, toy train, cap gun, catapult, football, rugby ball, basketball,
volleyball, golf ball, golf club, tennis ball, tennis racket, squash racket,
shuttlecock, cricket bat, baseball bat, hockey stick, ice skate, roller skate,
ski, ski pole, snowboard, bodyboard, paddle, oar, kayak, dinghy, life jacket,
lifebuoy, diving mask, goggle strap, swim cap, barbell, kettlebell, exercise
bike, treadmill, boxing glove, shin guard, elbow pad, mouthguard, yoga mat,
foam roller, jump rope, stopwatch, goalpost, football net, corner flag, hurdle,
javelin, relay baton, archery bow, arrow, quiver, target, fencing sword,
fishing rod, fishing reel, fishing net, tackle box, landing net, tent, tent
peg, sleeping bag, camp bed, camping stove, headlamp, picnic basket, picnic
blanket, cool box, climbing rope, carabiner, ice axe, crampon, climbing
harness, trekking pole, bivouac sack, bicycle, mountain bike, bike lock,
bicycle bell, bicycle pump, pannier, saddle, saddlebag, bridle, horseshoe,
riding crop, tyre, inner tube, bike light, child seat, car seat, roof rack,
caravan, trailer, sail, anchor, buoy, mooring line, pennant, binocular case,
hiking map, survival kit, snooker cue, pool table, ping-pong table, table
tennis bat, croquet mallet, scoreboard, finish tape, medicine ball, resistance
band, pull-up bar, vaulting horse, lacrosse stick, wicket, curling stone, puck,
guitar, violin, cello, double bass, lute, banjo, mandolin, sitar, flute,
piccolo, clarinet, oboe, bassoon, saxophone, trombone, tuba, cornet, recorder,
accordion, concertina, bagpipe, piano, keyboard, organ, harpsichord, drum,
snare drum, bass drum, drumstick, drum kit, cymbal, tambourine, triangle,
maraca, castanet, xylophone, glockenspiel, marimba, gong, bell, bongo, djembe,
tuning fork, music stand, sheet music folder, guitar string, plectrum, capo,
violin bow, microphone, microphone stand, amplifier, loudspeaker, turntable,
vinyl record, record player, jukebox, cassette, headphone case, conductor's
baton, kazoo, pan pipe, dulcimer, lyre, pitch pipe, cowbell, wood block,
tablet, laptop, monitor, computer, mouse, trackpad, webcam, earphone, speaker,
hard drive, memory card, memory stick, charger, power bank, battery, adapter,
cable, phone, phone case, smartphone, landline phone, answering machine,
camera, camera lens, tripod, flashgun, film roll, photo printer, television,
television stand, remote control, aerial, satellite dish, radio, walkie-talkie,
drone, games console, game controller, e-reader, label printer, barcode
scanner, cash register, card reader, thermostat, motion sensor, door sensor,
humidifier, dehumidifier, air purifier, hairdryer, curling iron, electric
toothbrush, bathroom scale, hot-water bottle, heat lamp, solar panel, inverter,
transistor, capacitor, circuit board, microchip, oscilloscope, multimeter,
metal detector, intercom, pager, graphics card, motherboard, sound card,
docking station, server, label maker, night light, string light, lava lamp,
disco ball, strobe light, hearing aid, sat nav, stylus, keypad, basket, bag,
box, parcel, wash basket, jerrycan, jar, bottle, cask, hamper, sack, purse
hook, hairbrush, toothbrush, razor, nail file, lipstick, perfume bottle, hand
mirror, make-up bag, face mask, bandage, plaster, crutch, wheelchair,
stethoscope, syringe, pill box, sling, stretcher, eye patch, contact lens case,
keychain, luggage tag, passport cover, travel pillow, money belt, travel mug,
matchbox, lighter, ashtray, incense burner, oil lamp, tea light, firelighter,
log basket, coal scuttle, poker, fireguard, ticket, coin, voucher, gift card,
gift box, piggy bank, cash box, flag, flagpole, garland, wreath, bauble,
rosary, prayer mat, hymn book, dog lead, dog collar, dog bowl, dog basket, cat
flap, litter tray, scratching post, fish tank, fishbowl, aquarium, hamster
wheel, rabbit hutch, birdcage, perch, pet carrier, horse blanket, hay net, milk
churn, egg box, cattle trough, beekeeping suit, mousetrap, mosquito net, insect
trap, marquee, folding table, trestle, podium, stage light, film reel,
mannequin, shop sign, price tag, shopping trolley, shopping basket, carrier
bag, cardboard box, packing crate, bubble envelope, jiffy bag, mailing tube,
pushcart, sack barrow, windscreen, wing mirror, number plate, hubcap,
headlight, bumper, steering wheel, seat cover, floor mat, jump lead, warning
triangle, petrol can, ice scraper, dashboard, mudguard, oil filter, fan belt,
telescope stand, hatbox, jewel case, snuffbox, drawstring bag, peg bag,
feather, pebble, crystal, gemstone, pearl, ruby, sapphire, emerald, opal,
amethyst
"""

FOODS = """
apple, pear, melon, lemon, onion, carrot, pumpkin, cake, pie, muffin, cookie,
sandwich, pizza, bagel, loaf of bread, orange, banana, cucumber, egg, burger,
salad, doughnut, apple tart, cheese roll, apricot, nectarine, cherry, grape,
raspberry, blueberry, cranberry, gooseberry, lime, tangerine, clementine,
satsuma, kumquat, papaya, guava, lychee, passion fruit, dragon fruit,
pomegranate, fig, kiwi, coconut, watermelon, quince, persimmon, tomato, potato,
sweet potato, parsnip, turnip, swede, beetroot, leek, shallot, garlic bulb,
artichoke, cauliflower, endive, chilli, mushroom, truffle, corn cob, broad
bean, chestnut, hazelnut, pecan, pistachio, macadamia, peanut bar, granola bar,
flapjack, brownie, shortbread, scone, crumpet, eclair, macaroon, meringue,
cheesecake, cupcake, birthday cake, wedding cake, fruitcake, sponge cake,
gingerbread man, custard tart, lemon tart, treacle tart, strudel, turnover,
cinnamon bun, hot cross bun, baguette, ciabatta, focaccia, sourdough loaf,
brioche, pitta, tortilla, wrap, burrito, taco, quesadilla, empanada, spring
roll, dumpling, ravioli tray, lasagne, sausage roll, pasty, meat pie, fish pie,
kebab, falafel, hot dog, meatball, sausage, chop, steak, roast chicken, duck
breast, ham, fish finger, kipper, lobster, prawn skewer, crab cake, croquette,
potato cake, rice ball, sushi platter, cheese board, cheese wheel, pickle,
gherkin, olive tray, chocolate bar, toffee apple, lollipop, gumdrop, jelly
bean, marshmallow, truffle box, fudge slice, nougat bar, candy cane, ice cream
cone, ice lolly, sorbet, smoothie, jelly, crepe, rusk, breadstick, rice
cracker, crispbread, popover, club sandwich, panini, cheese toastie, pork pie,
veggie burger, fruit salad, fruit basket, mince pie, rum cake, poppy seed roll,
jam doughnut, pecan pie, carrot cake, energy bar, sesame bagel, garlic baguette
"""

CONTAINERS = """
bag, box, crate, packet, sack, carton, basket, bucket, case, parcel
"""

CONTENTS = """
rice, flour, sugar, salt, tea, coffee, beans, nuts, raisins, apples, oranges,
cherries, sand, soil, seeds, screws, nails, chalk, soap, washing powder,
biscuits, charcoal, firewood, barley, millet, couscous, semolina, quinoa,
chickpeas, peas, maize, wheat, bran, granola, sultanas, currants, figs,
apricots, pears, peaches, grapes, limes, lemons, tomatoes, potatoes, onions,
carrots, turnips, mushrooms, olives, capers, gherkins, peanuts, cashews,
hazelnuts, pecans, pistachios, crisps, crackers, popcorn, toffees, caramels,
mints, marshmallows, chocolates, truffles, cinnamon, ginger, saffron, cloves,
cardamom, basil, thyme, oregano, parsley, dill, yeast, baking powder,
cornflour, breadcrumbs, noodles, spaghetti, plaster, cement, mortar mix, lime
powder, clay, peat, compost, mulch, bark, hay, straw, bird seed, cat litter,
dog biscuits, fish food, coal, matches, candles, buttons, marbles, bolts,
washers, hooks, rivets, tacks, staples, paper clips, pins, needles, pegs,
tiles, bricks, pebbles, feathers, wool, cotton, tissues, napkins, wipes,
sponges, cloths, bandages, plasters, pencils, envelopes, labels, batteries,
fuses, tulip bulbs, grass seed, bath salts, salt crystals, dried fruit, trail
mix, tea leaves, brown sugar, table salt
"""

VESSELS = """
bottle, jar, tin, can, drum, keg, pot, canister, tube
"""

LIQUIDS = """
milk, olive oil, vinegar, soup, paint, glue, lemon juice, cider, ketchup, ink,
shampoo, water, wine, beer, ale, rum, brandy, gin, whisky, sherry, port, cream,
buttermilk, custard, gravy, broth, stock, cooking oil, sesame oil, soy sauce,
fish sauce, hot sauce, chutney, relish, salsa, pesto, hummus, jam, treacle,
mayonnaise, salad dressing, apple juice, orange juice, tomato juice, grape
juice, ginger beer, iced tea, squash, kombucha, vermouth, conditioner, lotion,
hand cream, body oil, bubble bath, liquid soap, detergent, bleach, furniture
polish, floor wax, shoe polish, turpentine, lacquer, wood stain, engine oil,
petrol, paraffin, lamp oil, linseed oil, weedkiller, plant food, perfume,
cologne, aftershave, peanut butter, tahini, coconut milk, rose water, face
cream, toothpaste, hair gel
"""

HELD_OUT_ADJECTIVES = """
pink, turquoise, beige, crimson, navy, azure, transparent, steel, zinc, silk,
corduroy, jute, porcelain, gilt, checked, plaid, flowery, paisley, zigzag,
bleached, gilded, waxed, frosted, shiny, reflective, woven, plaited, padded,
tiny, narrow, wide, slim, thin, oval, triangular, single, triple, three-legged,
hooded, foldable, inflatable, vintage, antique, rustic, repaired, reclaimed,
regular, basic, discounted, superior, industrial, genuine, artificial,
ornamental, elegant, graceful, tropical, coastal, sturdy, featherweight,
flexible, velvety, grooved, squeaky, unscented, windproof, clockwork, cordless,
magnetic, glowing, unbreakable, sealed, biodegradable, eco-friendly,
beginner's, starter, practical, bare, dented, boxed
"""

HELD_OUT_ITEMS = """
teapot, saucer, kettle, ladle, spatula, wok, goblet, placemat, teaspoon,
cafetiere, skillet, steamer, stool, armchair, bookshelf, drawer, cot, quilt,
doormat, chandelier, lantern, lampshade, hammock, deckchair, doorknob, padlock,
tapestry, barometer, futon, windowsill, hammer, wrench, hacksaw, spirit level,
workbench, beam, valve, mop, broom, vacuum cleaner, anvil, blowtorch,
multitool, weathervane, pickaxe, shovel, lever, gasket, chainsaw, spade,
planter, trellis, shed, pergola, scarecrow, dahlia, peony, marigold, petunia,
crocus, cloche, snapdragon, lupin, rhododendron, crayon, hole punch, binder,
inkwell, shredder, sticker, medal, pinboard, pointer, logbook, scarf, sweater,
jumper, pullover, overcoat, raincoat, poncho, cloak, slipper, sandal, loafer,
clog, beret, hairpin, veil, tiara, bracelet, pendant, bandana, sari, kilt,
tunic, robe, swimsuit, tracksuit, zip, shoehorn, monocle, corset, bib,
pinafore, chessboard, frisbee, boomerang, swing, pushchair, tricycle, lucky
charm, dreamcatcher, stilt, surfboard, canoe, snorkel, flipper, dumbbell,
punchbag, helmet, discus, shot put, torch, snowshoe, stirrup, springboard,
catcher's mitt, zither, trumpet, bugle, harmonica, synthesizer, metronome,
ocarina, didgeridoo, headset, router, modem, projector, joystick, smartwatch,
shaver, resistor, megaphone, dashcam, dictaphone, touchscreen, comb, magnet,
token, bunting, muzzle, flyswatter, canopy, clapperboard, exhaust, gearstick,
seashell, fossil
"""

HELD_OUT_FOODS = """
peach, mango, cabbage, croissant, pancake, waffle, pineapple, pretzel,
strawberry, blackberry, grapefruit, avocado, radish, aubergine, courgette,
lettuce, teacake, profiterole, flatbread, samosa, quiche, omelette, turkey,
oyster, sundae, milkshake, trifle, pudding, oatcake, fishcake
"""

HELD_OUT_CONTAINERS = """
tub, pouch, pallet, bundle
"""

HELD_OUT_CONTENTS = """
cereal, lentils, oats, pepper, cocoa, plums, walnuts, gravel, pasta, almonds,
rye, muesli, prunes, liquorice, nutmeg, turmeric, cumin, paprika, sage,
macaroni, fertiliser, kindling, beads, shells
"""

HELD_OUT_VESSELS = """
barrel, jug, flask
"""

HELD_OUT_LIQUIDS = """
mustard, yoghurt, varnish, syrup, lemonade, marmalade, molasses, horseradish,
cola, cordial, mead, primer, grout, sealant, antifreeze, sunscreen
"""
