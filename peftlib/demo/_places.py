"""Places where the demo's events are.

Plain lists; `order_words` says what they are for. Those of held-out rows share
no word with those of training.
"""

TOWNS = """
Leeds, Oslo, Lisbon, Boston, Prague, Dublin, Nairobi, Osaka, Denver, Cairo,
Lyon, Warsaw, Austin, Geneva, Milan, Chicago, Porto, Seattle, Athens, Glasgow,
Mumbai, Brussels, Lima, Oxford, Dallas, Bergen, Sydney, Paris, Turin, Delhi,
Cardiff, Rome, Phoenix, Berlin, York, Helsinki, Miami, Naples, Kyoto, Quebec,
Dakar, London, Stockholm, Bath, Houston, Lagos, Perth, Cologne, Detroit,
Seville, Tokyo, Norwich, Rotterdam, Santiago, Ottawa, Exeter, Sofia, Basel,
Adelaide, Cork, New York, San Diego, Cape Town, Aachen, Aalborg, Aarhus,
Aberdeen, Abidjan, Abu Dhabi, Abuja, Adana, Agra, Ahmedabad, Ajaccio,
Albuquerque, Aleppo, Algiers, Alicante, Almaty, Altona, Amarillo, Amiens,
Amman, Amritsar, Amsterdam, Anchorage, Ancona, Andorra, Angers, Ankara,
Annapolis, Arequipa, Arezzo, Arles, Arnhem, Arusha, Asheville, Ashford, Assisi,
Asuncion, Aswan, Auckland, Augsburg, Avignon, Aviles, Aylesbury, Baden,
Baghdad, Bamberg, Bandung, Bangalore, Bangkok, Barcelona, Barnsley, Barrie,
Basra, Batumi, Bayonne, Beijing, Beira, Beirut, Belfast, Belgrade, Bern,
Bhopal, Biarritz, Bielefeld, Birmingham, Bismarck, Blackpool, Bloomington,
Bodo, Bolton, Bolzano, Bordeaux, Boulder, Bournemouth, Bradford, Brasilia,
Bratislava, Breda, Bremen, Brescia, Brest, Bridgetown, Brighton, Brisbane,
Brno, Bruges, Bucharest, Budapest, Buffalo, Burgas, Burgos, Burlington, Busan,
Cadiz, Caen, Cagliari, Cali, Cambridge, Canberra, Cannes, Canterbury, Caracas,
Carlisle, Casablanca, Catania, Charlotte, Chennai, Chiang Mai, Chicoutimi,
Chisinau, Chongqing, Christchurch, Cleveland, Coimbra, Colchester, Colombo,
Como, Constanta, Copenhagen, Cordoba, Cottbus, Coventry, Cremona, Dalian,
Damascus, Dar es Salaam, Darmstadt, Davos, Dayton, Debrecen, Delft, Derby,
Dessau, Doha, Doncaster, Dortmund, Dubai, Duluth, Dundee, Durham, Dusseldorf,
Eindhoven, Erfurt, Essen, Eugene, Evora, Fairbanks, Flagstaff, Foggia,
Fortaleza, Frankfurt, Freetown, Fresno, Fukuoka, Galveston, Galway, Genoa,
Girona, Gloucester, Goa, Gothenburg, Gottingen, Grenoble, Grimsby, Guadalajara,
Guildford, Halle, Hamilton, Hannover, Harare, Harbin, Hartford, Havana,
Heidelberg, Helena, Hiroshima, Hobart, Huelva, Hull, Hyderabad, Ibadan, Inchon,
Indianapolis, Innsbruck, Inverness, Irkutsk, Isfahan, Izmir, Jaipur, Jena,
Jerusalem, Johannesburg, Juneau, Kabul, Kansas City, Karachi, Karlsruhe,
Kassel, Kaunas, Kelowna, Khartoum, Kiel, Kigali, Kilkenny, Kingston,
Klagenfurt, Knoxville, Kobe, Koblenz, Kolkata, Konstanz, Kosice, Kuala Lumpur,
Kuwait City, Kyiv, Lahore, Larnaca, Las Vegas, Lecce, Leiden, Leipzig, Lens,
Leon, Lille, Limassol, Limerick, Limoges, Linz, Liverpool, Livorno, Ljubljana,
Lodz, Logrono, Louisville, Luanda, Lublin, Lubeck, Lucerne, Lucknow, Lugano,
Lund, Lusaka, Luton, Luxor, Maastricht, Macau, Madison, Magdeburg, Mainz,
Malaga, Malmo, Manaus, Manila, Mannheim, Mantua, Maribor, Medellin, Melbourne,
Mendoza, Merida, Messina, Metz, Milwaukee, Minneapolis, Minsk, Modena, Monaco,
Monrovia, Montevideo, Montpellier, Monza, Moscow, Mostar, Mulhouse, Munster,
Murcia, Muscat, Mysore, Nagasaki, Nagoya, Namur, Nancy, Nanjing, Neuchatel,
Newark, Newcastle, Nicosia, Nimes, Norfolk, Nuremberg, Oakland, Oaxaca,
Oldenburg, Omaha, Oran, Orlando, Orleans, Ostend, Ostrava, Oulu, Padua, Palma,
Panama City, Parma, Pasadena, Passau, Patras, Pavia, Penang, Pescara, Phnom
Penh, Pisa, Pittsburgh, Plymouth, Poitiers, Portland, Potsdam, Poznan, Preston,
Pretoria, Providence, Pula, Pune, Quito, Rabat, Raleigh, Rangoon, Ravenna,
Recife, Reims, Rennes, Richmond, Rijeka, Rimini, Rochester, Rosario, Rostock,
Rouen, Sacramento, Salamanca, Salerno, Salford, Salta, Salvador, Samarkand, San
Antonio, San Francisco, Santander, Santa Fe, Sapporo, Saskatoon, Savannah,
Scarborough, Schwerin, Segovia, Sendai, Seoul, Shanghai, Sheffield, Shenzhen,
Shrewsbury, Siena, Skopje, Sligo, Southampton, Spokane, Stavanger, St
Petersburg, Stockport, Strasbourg, Stuttgart, Sunderland, Suva, Swansea,
Swindon, Syracuse, Tacoma, Taipei, Tallahassee, Tampere, Tangier, Taranto,
Tarragona, Tartu, Tashkent, Tbilisi, Teheran, Thessaloniki, Tijuana, Tirana,
Toledo, Toulon, Toulouse, Tours, Trento, Trieste, Tromso, Truro, Tucson, Tulsa,
Tunis, Turku, Umea, Uppsala, Urbino, Valparaiso, Vancouver, Varna, Vasteras,
Venice, Verona, Vichy, Vilnius, Wakefield, Walsall, Warwick, Washington,
Weimar, Wellington, Wichita, Wigan, Windsor, Wolverhampton, Worcester,
Wuppertal, Xian, Yerevan, Yokohama, Zaragoza, Zwickau, Zwolle
"""

TOWN_STEMS = """
Alder, Barn, Bed, Birken, Chester, Clay, Darling, Elm, Fern, Gold, Hazel, High,
Kings, Lamb, Middle, Mill, New, Oak, Rock, Sand, Spring, Stone, Swin, Taun,
Whit, Apple, Arrow, Ash, Bar, Battle, Beaver, Beech, Bell, Bex, Bishop, Black,
Blan, Boar, Box, Bran, Bree, Bride, Brigh, Broad, Bux, Carlin, Castle, Cherry,
Clare, Cold, Corn, Cotter, Cow, Crow, Deer, Den, Dork, Dove, Drift, Eagle,
Edge, Falcon, Fair, Farring, Fel, Fin, Flint, Fox, Frod, Glas, Glen, Goos,
Grass, Graves, Green, Grim, Had, Hal, Ham, Hare, Hart, Haver, Hay, Heath, Hem,
Hex, Holm, Hor, Hunting, Kel, Ken, Kettle, Knut, Lang, Lav, Laun, Lich, Litch,
Lough, Lud, Mar, Mat, Mel, Mor, Nettle, Nun, Orm, Otter, Pad, Peter, Pol,
Quarry, Rams, Raven, Red, Ring, Rother, Rush, Rye, Saff, Sel, Shaf, Ship,
Shrews, Silver, Skip, Snow, South, Staf, Stam, Strat, Sud, Swan, Tav, Thatch,
Thet, Tiver, Wal, War, Water, Wolf, Wool, Yar, Yeo
"""

TOWN_ENDINGS = """
borough, bridge, burn, church, cliff, don, ford, gate, ham, head, hurst, ley,
mouth, port, stead, ton, well, wood, bury, by, combe, dale, field, minster,
wick, worth, haven, stow, thorpe, mere, side, bourne, pool, ridge
"""

VENUE_NAMES = """
Maple, Harbour, Cedar, Station, Victoria, River, Castle, Garden, Union, Market,
Bridge, Park, Lion, Crown, Hill, Forest, Liberty, Sunrise, Rose, Oak, Pearl,
Royal, Mill, Tower, Willow, Swan, Albion, Alder, Alpine, Amber, Anchor, Angel,
Aqua, Arcade, Argyle, Ash, Aspen, Atlas, Aurora, Badger, Bamboo, Banner, Bay,
Bayside, Bell, Belmont, Birch, Blossom, Bluebell, Boulevard, Bramble, Brewery,
Briar, Brick, Broadway, Bronze, Brook, Buttercup, Butterfly, Camellia, Candle,
Cannon, Canyon, Capital, Capitol, Cardinal, Cascade, Cathedral, Cavalier,
Cherry, Chestnut, Circus, Citadel, City, Civic, Cliff, Cloud, Clover, Coach,
Coast, Cobalt, Colonial, Colony, Comet, Compass, Concord, Copper, Coral,
Corner, Cottage, Courtyard, Cove, Crane, Cricket, Cross, Crystal, Daffodil,
Dale, Dawn, Delta, Diamond, Dolphin, Dragon, Drake, Dune, East, Ember, Emerald,
Empire, Estate, Evergreen, Fair, Feather, Fern, Festival, Field, Finch,
Fountain, Fox, Foxglove, Freedom, Galaxy, Gate, Gateway, Gazelle, Georgian,
Glacier, Glade, Glen, Globe, Grange, Guild, Gull, Harvest, Haven, Hawk,
Hawthorn, Hazel, Heath, Heather, Heritage, Highland, Hilltop, Holly, Horizon,
Hunter, Imperial, Iris, Iron, Ivory, Ivy, Jade, Jasmine, Junction, Jupiter,
King, Kingfisher, Laburnum, Lagoon, Laurel, Lavender, Leaf, Lighthouse, Lily,
Lime, Linden, Lotus, Magnolia, Majestic, Manor, Maritime, Mariner, Memorial,
Mercury, Metro, Midland, Mint, Mirror, Moon, Moonlight, Moor, Mosaic, Mountain,
Mulberry, Neptune, New, Nightingale, Noble, Northern, Oasis, Old, Olive,
Olympia, Onyx, Opal, Opera, Orange, Orchid, Orion, Osprey, Otter, Owl, Pacific,
Palace, Palm, Paradise, Parade, Paragon, Parkside, Peacock, Pebble, Peninsula,
Phoenix, Pier, Pilgrim, Pine, Pioneer, Poplar, Poppy, Prairie, Premier,
Primrose, Prince, Priory, Promenade, Quarry, Quay, Queen, Railway, Rainbow,
Raven, Red, Redwood, Reef, Republic, Ridge, Ring, Robin, Rosemary, Rowan, Ruby,
Saffron, Sail, Sand, Sapphire, Saturn, Scarlet, Seaside, Shamrock, Silver,
Skylark, Snowdrop, Solar, South, Southern, Spire, Spring, Square, Stag, Star,
Starlight, Stone, Stork, Sun, Sunflower, Sunset, Sycamore, Temple, Terrace,
Thistle, Tulip, Velvet, Venus, Village, Vine, Vineyard, Violet, Water,
Waterfall, Wellington, Western, Wharf, Wheel, White, Windmill, Windsor, Wood,
Woodland, Wren, Yew
"""

VENUES = """
Hall, Cafe, House, Hotel, Library, School, Museum, Theatre, Club, Restaurant,
Clinic, Studio, Centre, College, Church, Gallery, Tavern, Pub, Bar, Brasserie,
Diner, Grill, Pizzeria, Tearoom, Guesthouse, Hostel, Lodge, Spa, Gym, Stadium,
Pool, Court, Ballroom, Auditorium, Cinema, Playhouse, Conservatory, Hospital,
Surgery, Pharmacy, Institute, University, Campus, Workshop, Factory, Warehouse,
Office, Tower, Mall, Store, Bookshop, Salon, Farm, Zoo, Aquarium, Observatory,
Monastery, Mosque, Synagogue, Embassy, Depot, Terminal, Barn, Villa
"""

HELD_OUT_TOWNS = """
Vienna, Bristol, Madrid, Toronto, Hamburg, Zurich, Accra, Atlanta, Munich,
Bogota, Ghent, Krakow, Riga, Tampa, Marseille, Los Angeles, Acapulco, Agadir,
Akron, Albany, Alexandria, Almeria, Annecy, Antalya, Ayr, Baku, Bamako, Bangor,
Bari, Bergamo, Besancon, Bochum, Boise, Bologna, Bonn, Braga, Bursa, Cartagena,
Charleston, Chemnitz, Chester, Cincinnati, Cluj, Columbus, Corinth, Cusco,
Dhaka, Dijon, Dover, Dubrovnik, Dunedin, Durban, Faro, Ferrara, Fez, Flensburg,
Freiburg, Geelong, Gibraltar, Granada, Graz, Groningen, Guangzhou, Guatemala,
Haarlem, Haifa, Halifax, Hastings, Hereford, Honolulu, Ibiza, Ipswich, Jerez,
Kampala, Kandy, Kathmandu, Katowice, Kazan, Kinshasa, Kisumu, Kumasi,
Lancaster, Leicester, Lexington, Lincoln, Lucca, Lviv, Madurai, Maputo,
Marrakesh, Mombasa, Montreal, Nagpur, Nassau, Newport, Northampton, Nottingham,
Novi Sad, Odessa, Olomouc, Oporto, Oviedo, Pamplona, Perugia, Peterborough,
Philadelphia, Piacenza, Plovdiv, Portsmouth, Reno, Salem, Sao Paulo, Sarajevo,
Surat, Szczecin, Szeged, Tel Aviv, Timisoara, Tripoli, Trondheim, Troyes, Ulm,
Valletta, Vicenza, Vigo, Wexford, Wiesbaden, Winchester, Windhoek, Wroclaw,
Wuhan, Zadar, Zanzibar, Antwerp, Bilbao, Calgary, Dresden, Edinburgh, Florence,
Gdansk, Hanoi, Istanbul, Jakarta, Lausanne, Memphis, Nantes, Odense, Palermo,
Reykjavik, Salzburg, Tallinn, Utrecht, Valencia, Winnipeg, Zagreb, Baltimore,
Manchester, Nashville, Singapore, Buenos Aires
"""

HELD_OUT_TOWN_STEMS = """
Long, Amber, Brock, Crom, Dun, Gill, Hather, Ips, Led, Nor, Pick, Sher, Berry,
Crane, Harpen, Lin, Lym, Pine, Thorn, Tor, Ux, Wey, Wheat, Wind
"""

HELD_OUT_TOWN_ENDINGS = """
bury, by, combe, dale, field, minster, wick, worth
"""

HELD_OUT_VENUE_NAMES = """
Lake, Central, Eagle, Ocean, Juniper, Lantern, Granite, Meadow, Sparrow,
Regent, Falcon, Orchard, Beacon, Marina, Plaza, Heron, Canal, Abbey, Acorn,
Apollo, Arch, Astoria, Avenue, Balcony, Chariot, Crescent, Cypress, Dove, Echo,
Elm, Express, Fairway, Ferry, Frontier, Grand, Grove, Island, Jubilee,
Landmark, Lark, Lower, Magpie, Monarch, North, Orient, Panorama, Pelican,
Riverside, Shore, Swallow, Tiger, Trinity, Tunnel, Upper, Valley, Victory,
Vista, West, Zenith, Zodiac
"""

HELD_OUT_VENUES = """
Inn, Bistro, Arena, Academy, Pavilion, Lounge, Bakery, Chapel, Resort, Ground,
Nursery, Courthouse
"""
