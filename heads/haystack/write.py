"""Write the default haystack: three long, plain and unimportant books.

    python -m heads.haystack.write

Every sentence comes from the templates below, so the text belongs to this project and is the same on every machine.
A paragraph draws a person and a place, then some sentences of one scene and a few general remarks. Templates and words
are dealt like cards: none returns before its deck is used up, and no sentence is written twice."""

import random
import re
import sys
from pathlib import Path

import cli

FOLDER = Path(__file__).parent
WORDS_PER_BOOK = 17_200

# A slot {name} is filled from its row. The paragraph fixes {name}, {she}, {her}, {friend} and {place}.
WORDS = """
woman: Marta Lind | Agnes Pell | Ruth Okoro | Ilse Brandt | Nora Quayle | Hanna Voss | Greta Simms | Clara Denby |
  Tilda Marsh | Edith Lowe | Paula Renn | Vera Stoll | Ida Carrow | Joan Hebden | Sofia Merle | Lena Orchard
man: Tomas Reed | Peter Hask | Oliver Dunn | Anton Vale | Jonas Wick | Henry Abbot | Samuel Crane | Piet Larsen |
  Walter Finch | Aaron Moss | Luke Tarrant | Felix Horn | Martin Gale | Daniel Oake | Emil Stroud | Victor Penn
month: January | February | March | April | May | June | July | August | September | October | November | December
day: Monday | Tuesday | Wednesday | Thursday | Friday | Saturday | Sunday
season: spring | summer | autumn | winter
number: two | three | four | five | six | seven | eight | nine | ten | eleven | twelve | fourteen | fifteen | eighteen
  | twenty | thirty | forty
small: two | three | four | five | six | seven
year: first year | second year | year after the flood | year of the long frost | dry year |
  last year of the old council | year the road was widened | third year
when: in the early morning | late in the afternoon | shortly after breakfast | on wet evenings | when the wind dropped
  | at the end of {month} | in the first week of {month} | on the second {day} of {month} | before the lamps were lit
  | after supper | towards noon | during the quiet weeks of {season} | around the middle of {month} |
  on most {day} mornings | once the rain had passed | while the kettle boiled | an hour before dusk | on the way home
  | at weekends | in the {year} | one {season} evening | just after the bells | during {month} |
  as soon as the frost was gone
time: for {small} years | for most of {month} | for nearly {number} days | until the end of {season} |
  from {month} to {month} | all through the {season} | for an hour or so | every {day} | twice a month |
  for as long as anyone remembered | until the light failed | for {number} weeks
mood: patiently | without hurry | with great care | rather badly at first | in complete silence | with some pride |
  as if nothing had happened | more slowly than before | with the door open | for no particular reason |
  in good spirits | with cold hands | from memory | by the light of a lamp
colour: grey | pale green | dark blue | yellow | brown | white | rust-red | faded pink | black | cream | silver |
  moss-green
weather: a thin rain | low cloud | a dry east wind | heavy snow | a warm haze | sharp frost | steady drizzle |
  clear sky | a sudden hailstorm | mild air | thick fog | a bright cold sun | gusty wind | light showers
stuff: oak | tin | brass | canvas | slate | wool | clay | pine | leather | copper | linen | iron | cork | wicker |
  glass
solid: oak | tin | brass | slate | pine | copper | iron | horn | bone | glass | pewter | walnut | steel | cherry wood
object: a {solid} box | a {colour} jug | a folding chair | a length of rope | a cracked mirror | a bundle of letters |
  a {colour} coat | an empty crate | a box of nails | a {solid} lamp | a pair of boots |
  a ledger with a {colour} cover | a broken umbrella | a coil of wire | a {colour} blanket | a set of spoons |
  a wooden ladder | a jar of buttons | a small bell | a sack of flour | a {solid} tray | a pencil stub | a spare key |
  a bicycle pump
food: barley bread | pea soup | smoked herring | apple cake | boiled eggs | cabbage stew | plum jam | oat biscuits |
  hard cheese | fried potatoes | onion pie | rye rolls | pickled beets | rice pudding | bean broth | roast chestnuts
drink: strong tea | weak coffee | cider | cold milk | ginger water | elder cordial | hot lemon | plain water
animal: a grey cat | an old dog | a lame crow | a brown hen | a pair of pigeons | a tame jackdaw | a stubborn donkey |
  a hedgehog | a family of mice | a thin fox | two geese | a black goat
kin: cousin | aunt | brother | neighbour | grandmother | sister | uncle | godfather | nephew | landlady
job: carpenter | nurse | postman | teacher | baker | surveyor | clerk | cook | painter | tailor | mason | librarian |
  driver | gardener
far: the next county | the capital | the other side of the bay | a town up the line | the mountains | the islands |
  the south | a village nobody could name
size: a hand | a thumb | a door | a barrel | a cartwheel | a loaf | a table | a coin
worth: worth the trouble | better than nothing | a bargain | a mistake | good enough | a small victory |
  nobody's business | a nuisance | a matter of taste | more useful than it looked
doubt: nobody could say why | few people noticed | the reason was never written down | that was not the whole story |
  opinions differed | it made little difference | the habit stayed | it was soon forgotten | no one complained |
  the cost was small | it worked | the neighbours approved | some people laughed | the matter rested there
"""

# Remarks that fit anywhere.
GENERAL = """
{When}, {name} walked to {place} and came back with {object}.
There was {weather} over {place}, and {doubt}.
{She} had learned this from {her} {kin}, who came from {far}.
{friend} thought it {worth}, though {name} did not agree.
They ate {food} and drank {drink} {when}.
Somebody had left {object} beside the door, and it stayed there {time}.
It was {worth}, and {doubt}.
{name} counted {number} of them {when} and {number} the day after.
{animal} slept under the bench {time}, {mood}.
The {job} from {far} asked about it {when}, but {doubt}.
{name} kept {object}, {object} and {object} on the same shelf.
{When} there was {weather}, and the people of {place} stayed indoors.
{friend} offered {small} coins for it, which {name} refused {mood}.
A letter from {far} arrived {when}; it was about the price of {stuff}.
The floor was made of {solid}, and the walls had been painted {colour} in the {year}.
If {weather} came, they moved everything inside and waited {mood}.
{She} used to say that {food} tasted best with {drink}, and {friend} used to say nothing.
Years later {friend} still remembered the smell of wet {stuff} and {food}.
A visitor once measured the room and wrote down that it was {number} steps long.
Nothing else happened {when}, unless one counts {animal} in the yard.
{name} had a {kin} who worked as a {job}, and they met {time}.
"We shall see," said {friend}, and went to look for {object}.
"It will do," said {name}, {mood}.
In the window stood {object}, which nobody had asked for.
Between {place} and the road lay a strip of grass where {animal} could often be seen.
{friend} wrote the figures on the back of an envelope and lost it {when}.
The door was {colour}, the roof was {colour}, and {doubt}.
Because of {weather}, the meeting was moved to {day}, when fewer people came.
It took {number} minutes to explain and {small} years to understand.
{name} and {friend} had once argued about {food}, and since then they spoke of other things.
A {job} and a {job} shared the upper floor, and both of them were fond of {drink}.
From the steps one could see {place}, or at least its {colour} chimney.
{When} {name} would open the window, listen, and close it again.
Not everything went well: {object} was lost, and {doubt}.
Some said that the {colour} paint was {worth}, others preferred plain {stuff}.
"""

BOOKS = {"harbour": """
place: the north pier | the fish market | the rope walk | the lighthouse | the ferry landing | the old slipway |
  the salt store | the customs shed | the shingle beach | the chart room | the boat yard | the oyster beds
boat: a {colour} ketch | the mail boat | a flat barge | the pilot cutter | a small trawler | a rowing boat |
  the {day} ferry | a dredger | an old lugger | a coal ship | a racing skiff | the tug
fish: herring | mackerel | plaice | cod | whiting | eels | sprats | crabs | lobsters | mussels | hake | skate
bird: gulls | terns | cormorants | oystercatchers | gannets | turnstones | puffins | herons | curlews | ducks
sea: the swell | the ebb | the spring tide | the current | the surf | the neap tide | the open water | the bar

When the tide was low, {name} gathered {fish} among the rocks near {place}.
{She} could tell {fish} from {fish} by their smell alone.
The price of {fish} fell {when}, and the boats stayed out longer.
{number} baskets of {fish} were landed at {place} {when}.
{friend} salted the {fish} {mood} and packed them in {solid} barrels.
The buyers walked along the rows, lifted a lid here and there, and named a price.
Most of the {fish} went by train to {far}, packed in ice and straw.
A good catch of {fish} meant new boots, and a poor one meant {food}.

{boat} came in {when} with a torn sail and {number} passengers.
The crew of {boat} painted the hull {colour} and the deck {colour}.
It took {small} people to turn {boat} around at {place}.
{name} had bought a share in {boat} and regretted it {time}.
Nobody could agree who had the right to moor {boat} beside {place}.
The engine of {boat} could be heard long before it passed the point.
{When} {boat} ran aground, and everybody came to watch {mood}.
Below deck there was room for {number} sacks, {object} and one tired {job}.
The captain wrote the depth of the water in chalk on a {solid} board.

The lamp at {place} had to be trimmed {time}.
On a clear night its beam could be seen from {far}.
{name} climbed the {number} steps with oil in one hand and {object} in the other.
The glass was cleaned with {drink} and a {colour} cloth, because nothing else left so few streaks.
During fog a horn sounded once in {number} seconds, and {animal} answered it.
The keeper's log for {month} mentions {weather}, {bird} and little else.
{When} the lens stopped turning, and {friend} pushed it round by hand {time}.

Flocks of {bird} rested on the mud {when} and left {mood}.
{name} noted the {bird} in a book with a {colour} spine.
The nests of the {bird} lay so close together that one had to step {mood}.
Where {bird} dived, the fishermen expected {fish}.
{friend} once took in {small} young {bird} and fed them on {fish}.
The call of {bird} meant {weather}, or so the older people believed.
By {month} the {bird} had gone, and {place} seemed larger without them.

{sea} was stronger than the chart said, and {doubt}.
At the height of {season}, {sea} moved the whole bank {number} yards to the west.
{name} had marked the line of {sea} with stakes of {solid}.
Children learned to read {sea} before they learned to read letters.
A plank set adrift at {place} in {month} was found near {far} in {month}.
{When} the water rose above the wall of {place} and carried away {object}.
{friend} owned a tide table printed in {far}, and it was always {number} minutes late.
After the storm the beach was covered with weed, rope and {stuff}.

Nets were mended on the quay {when}, with needles made of {solid}.
A net of that kind holds {number} knots to the yard, and each one is tied by hand.
{name} preferred tarred twine, while {friend} used whatever was cheap.
In the loft hung {number} nets, {object} and a calendar from the {year}.
The rope makers walked backwards {time}, paying out fibre as they went.
A rope as thick as {size} will hold {boat} in most weathers.
{friend} spliced the two ends {mood} and bound them with {colour} thread.

The ferry left {place} {number} times a day, or less often in {month}.
A ticket cost {small} coins, and {animal} travelled free.
The passengers carried {object}, {object} and a great many parcels.
{name} sold {drink} at the landing and knew every face.
On the crossing {friend} read aloud from a report about {fish}.
When {weather} set in, the ferry waited, and so did the {job} with the mail.
The timetable hung beside a notice about {bird}, and both were out of date.

The customs officer opened the crate and found {object}, {number} plates and some straw.
A duty was charged on {stuff}, though not on {stuff}, and {doubt}.
Every paper needed {small} stamps, the last of them {colour}.
{name} filled in the form {mood} and signed for {number} barrels.
The scales in the shed were tested {time} with a weight of {solid}.
In the long room there hung a painting of {boat} in heavy weather.
""", "street": """
place: the potter's yard | the print shop | the corner bakery | the weaving hall | the clockmaker's window |
  the paper mill | the market square | the glass works | the bindery | the dye house | the tool shop |
  the evening school
tool: a narrow chisel | a bone folder | a round file | a wooden mallet | a pair of tongs | a flat brush | a steel rule
  | a hand drill | a scraper | an awl | a small plane | a pair of shears
ware: bowls | jugs | tiles | plates | candlesticks | drawers | bells | baskets | buckles | locks | bottles | hats
trade: pottery | weaving | printing | bookbinding | baking | clockmaking | glassblowing | dyeing | carpentry |
  saddlery
fault: a hairline crack | an uneven edge | a loose thread | a bubble near the rim | a missing letter | a stain of oil
  | a warped board | a wrong date
cloth: tweed | flannel | sailcloth | muslin | felt | velvet | twill | lace

Clay for the {ware} was dug near {place} and left outside {time}.
{name} threw {number} {ware} before noon and kept {small} of them.
The glaze was {colour} when wet and {colour} when it left the kiln.
A kiln of that size burned {number} bundles of wood and had to be watched {mood}.
{friend} found {fault} in the last of the {ware} and set it aside.
On the shelf stood {ware} in rows, each as tall as {size}.
The wheel was driven by the foot, and it creaked {when}.
Customers tapped the {ware} with a knuckle and listened to the sound.

The press stood in the cellar of {place} and shook the floor {when}.
{name} set the type letter by letter, with {tool} at {her} side.
There were never enough capitals, so headlines about {month} were kept short.
The notice announced a sale of {ware}, {cloth} and {object}.
{friend} read the proofs {mood} and still missed {fault}.
Ink was mixed from lamp soot and oil, and it got into the {food}.
Every sheet hung on a line {time} before it could be folded.
The almanac listed fairs, phases of the moon and the price of {stuff}.

The first loaves came out of the oven {when}, with {weather} outside.
{name} judged the dough with two fingers and never with a clock.
A sourdough had been kept alive at {place} {time}.
They sold {food} to the {job} and {food} to everyone else.
{friend} carried the trays to {place} on a cart with {small} wheels.
Flour from {far} was whiter, but it made a duller crust.
On {day} the queue reached as far as {place}, and {doubt}.

The loom had {number} shafts, most of them carved from {solid}.
{name} wove {cloth} with a {colour} warp and a {colour} weft.
It took {number} days to prepare the threads and {small} to weave them.
The pattern was called after {animal}, although it looked like {size}.
{friend} washed the {cloth} in the stream and dried it {time}.
A bolt of {cloth} was exchanged for {number} pounds of {stuff}.
In the dye house the vats were {colour}, {colour} and {colour}.
Madder gives red, weld gives yellow, and patience gives everything else.
Whoever stepped on the wet {cloth} paid a fine of {small} coins.

The clock from {place} lost {number} minutes a day, and {doubt}.
{name} took it apart with {tool} and laid the wheels on a {colour} cloth.
One tooth was missing, and {friend} cut a new one from {solid}.
A pendulum grows longer in {season}, which is why the clock ran slow in {month}.
Above the bench hung {number} clocks, and no two of them agreed.
{She} oiled the spindle with a feather {mood}.
The customer paid with {object} and a promise to return {when}.

The glass was gathered on an iron pipe and turned {mood}.
{name} had breath enough for a bottle as large as {size}.
A little cobalt made it blue, and a little more made it too dark to sell.
Broken {ware} were melted again, so nothing at {place} was ever wasted.
The furnace went out only once, {when}, because of {weather}.
{friend} found {fault}, shrugged, and sold the piece as a second.

The binder sewed the pages with linen thread and pressed them {time}.
{name} pared the leather with {tool} until it was as thin as a leaf.
A ledger needed {number} gatherings, a prayer book only {small}.
The gold was laid on with the white of an egg and {tool}.
{friend} lettered the spine {mood}, and the {kin} corrected the spelling.
Between the boards somebody had hidden {object} and a dried flower.

Twice a year the masters met at {place} to talk about {trade} and {trade}.
An apprentice in {trade} served {small} years and slept above the shop.
The test piece was to be made with {tool}, {tool} and no help.
{name} had tried {trade} before {she} settled on {trade}.
The rules forbade work {when}, but lamps could be seen behind the shutters.
{friend} taught arithmetic at the evening school and paid {her} rent in {ware}.
At the market {ware} stood beside {cloth}, and {food} beside {tool}.
The stall by {place} sold {cloth}, {ware} and second-hand coats.
""", "valley": """
place: the upper meadow | the mill pond | the stone bridge | the beech wood | the sheep fold | the railway halt |
  the weather station | the orchard | the quarry | the chapel path | the peat bog | the hill farm
plant: thyme | heather | nettles | foxgloves | wild garlic | clover | sorrel | cowslips | ferns | yarrow | mallow |
  gorse
tree: an old ash | the tall beech | a row of poplars | a hollow oak | a young rowan | the twin limes | a bent hawthorn
  | the last elm | a stand of larch | the pear tree
crop: oats | barley | turnips | rye | potatoes | beans | hay | flax | hops | kale
star: the pole star | a double star | the evening planet | a faint comet | the rings of Saturn | the belt of Orion |
  a shower of meteors | the new moon
beast: the sheep | the cattle | the goats | the horses | the bees | the hens | the pigs | the geese

{name} sowed {crop} in the long field and {crop} behind {place}.
The {crop} stood as high as {size} by the middle of {month}.
{weather} spoiled part of the {crop}, and {doubt}.
A field that had carried {crop} was left to {plant} {time}.
{friend} sharpened the scythe {mood} and cut {number} rows before breakfast.
The barn held {crop}, {object} and whatever {beast} did not need.
The harvest at {place} was weighed {when} and came to {number} loads.
They paid the helpers in {food}, {drink} and a share of the {crop}.

{beast} were moved to {place} {when}, before the path grew soft.
{name} knew each of them by its walk and called them {mood}.
In the {year}, {beast} fell ill, and a {job} from {far} was sent for.
{friend} slept beside {beast} {time}, with {object} for a pillow.
A gap in the wall let {beast} into the {crop}, and {doubt}.
The shearing took {number} days and ended with {food}.
Salt was put out for {beast} on flat stones near {place}.

The path climbed from {place} through {plant} and loose stones.
{When} {name} set out with {food}, a stick and {object}.
At the pass there was {weather}, and the view was gone.
The walk to {place} takes {number} minutes down and twice as long up.
A cairn marked the turning, but {friend} trusted {tree} instead.
Near the top grew {plant}, {plant} and a kind of moss nobody knew.
{friend} rested under {tree} and counted the roofs of the village.
The signpost had been turned round, so half the walkers reached {place} by mistake.

{name} pressed {plant} between the pages of an atlas.
Tea made from {plant} was said to help against coughs, and {drink} against everything else.
The flowers of the {plant} opened {when} and closed before noon.
{She} drew {plant} in {colour} ink, life-size, root and all.
Along the stream {plant} had driven out the {plant} within {small} years.
{friend} could not tell {plant} from {plant} and ate neither.
In {month} the slopes above {place} turned {colour}, then {colour}.

{tree} stood in the way of the new road, and the road was moved.
The rings of {tree} showed {number} dry years and a fire.
{name} planted a walnut beside {tree} on the day {her} {kin} was born.
From one trunk came {number} planks, {small} benches and a cradle.
The woodman left {tree} standing for {animal}.
{When} a branch fell on {place} and missed {friend} by {small} steps.
Resin from {tree} was boiled {time} and sold to the boat builders.

The river ran {colour} after {weather} and clear again by {day}.
A gauge at {place} showed how high the water had stood in the {year}.
The miller ground {crop} {when} and {crop} when nobody was looking.
{name} repaired the weir with {stuff}, {stuff} and a good deal of clay.
Trout rested below {place}, where the shade of {tree} fell on the water.
{friend} crossed by the stepping stones {mood}, carrying {object}.
The flood of {month} took the fence, {object} and half of the {crop}.

At the weather station the rain was measured {time} in a {solid} funnel.
{name} wrote "{weather}" in the log on {number} days of {month}.
The barometer had been a gift from {friend}, and it was usually right.
Snow lay on {place} {time}, and the post came on skis.
Old people foretold {weather} from the way {beast} stood in the field.
The coldest morning was in {month}, when {drink} froze in the cup.

{When} {friend} showed {star} to the children through a telescope made of {solid}.
{name} had seen {star} {small} times and described it {mood}.
The dome was opened with a rope, and {weather} closed it again.
A note beside {star} says only that the night was cold and the {drink} hot.
From {place} the sky was so dark that {star} cast a kind of shine on the snow.
{She} was sure of {star}, less sure of the hour.

The train stopped at {place} only if somebody waved.
{number} wagons of {crop} and one of {stuff} stood in the siding.
{name} had kept the signals {time} and knew the drivers by their whistles.
The ticket to {far} was {colour} and cost {number} coins.
{friend} left {object} in the second carriage and never saw it again.
Between the rails grew {plant}, and {beast} had to be driven off {when}.
"""}


def rows(text):
    """"slot: a | b" rows, continued on indented lines → {slot: [a, b]}."""
    text = re.sub(r"\s*\n +", " ", text.strip())
    return {slot: words.split(" | ") for slot, words in (row.split(": ", 1) for row in text.splitlines())}


def deck(cards, rng):
    """Deal the cards in random order, for ever, each once before any returns."""
    while True:
        yield from rng.sample(cards, len(cards))


def fill(template, decks, fixed):
    """Fill the slots, innermost words too, and put the sentence in order: capital letter, a before vowels → an."""
    def word(slot):
        text = fixed.get(slot[1].lower()) or next(decks[slot[1].lower()])
        return text[0].upper() + text[1:] if slot[1][0].isupper() else text

    while "{" in template:
        template = re.sub(r"\{(\w+)\}", word, template)
    template = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", template)
    return template[0].upper() + template[1:]


def write_book(text, seed, seen, n_words=WORDS_PER_BOOK):
    """One book of at least `n_words` words, paragraphs apart by a blank line; `seen` collects its sentences."""
    rng = random.Random(seed)
    vocabulary, *scenes = text.strip().split("\n\n")
    words = rows(WORDS) | rows(vocabulary)
    decks = {slot: deck(cards, rng) for slot, cards in words.items()}
    general = deck(GENERAL.strip().splitlines(), rng)
    scene_decks = [deck(scene.splitlines(), rng) for scene in scenes]
    book = []
    while sum(len(paragraph.split()) for paragraph in book) < n_words:
        for scene in rng.sample(scene_decks, len(scene_decks)):
            gender = rng.choice(["woman", "man"])
            fixed = {"name": next(decks[gender]), "friend": next(decks[rng.choice(["woman", "man"])]),
                     "place": next(decks["place"]), "she": "she" if gender == "woman" else "he",
                     "her": "her" if gender == "woman" else "his"}
            templates = [next(scene if rng.random() < 0.65 else general) for _ in range(rng.randint(4, 8))]
            sentences = [fill(template, decks, fixed) for template in templates]
            new = [s for s in dict.fromkeys(sentences) if s not in seen]
            seen.update(new)
            book.append(" ".join(new))
    return "\n\n".join(paragraph for paragraph in book if paragraph) + "\n"


def main():
    cli.parser("Write the haystack's texts anew, into this folder.").parse_args()
    seen = set()
    for seed, (name, text) in enumerate(BOOKS.items(), 1):
        (FOLDER / f"{seed}-{name}.txt").write_text(write_book(text, seed, seen), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(cli.run(main))
