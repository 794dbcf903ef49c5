"""Word lists of our own, and the prose, names and codes that tasks are made of.

Everything is drawn from the caller's generator: the same seed gives the same text.
"""

from collections.abc import Iterator
from random import Random


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _split(
    """
    acorn anchor apple arrow badge bakery barrel basket beacon bell bench bicycle blanket boat
    book boot bottle bowl branch bread bridge broom bucket button cabin camera candle canoe
    carpet castle cellar chair chapel cheese chimney clock cloud coat coin comet compass copper
    cottage crane crown cupboard curtain desk diary dolphin door dragon drawer drum eagle engine
    falcon feather fence ferry field flag flute forest fountain garden gate glove goat granite
    guitar hammer harbor harvest hedge helmet hill honey horse island jacket jar kettle key kite
    kitchen ladder lake lamp lantern leaf lemon letter library lighthouse lion market meadow
    mill mirror monkey moon mountain museum needle nest oak ocean orchard otter oven owl paddle
    painting palace paper parrot path pebble pencil piano pigeon pillow pine planet plate pocket
    pond puzzle rabbit raven ribbon river robin rocket roof rope rudder saddle sail scarf school
    shelf shovel signal silver spoon squirrel stable statue stone storm stove street sugar
    tailor teapot temple thunder ticket tiger tower train trumpet tulip tunnel turtle umbrella
    valley violin wagon walnut whistle willow window wolf
    """
)
ADJECTIVES = _split(
    """
    amber ancient autumn bitter blue bold brave bright brisk broad calm careful cheerful clever
    cold crimson curious curly damp dark deep distant dusty eager early elegant empty faded
    famous fancy fast fearless fierce fine fragile fresh frosty gentle giant glad golden grand
    gray green happy heavy hidden hollow honest humble icy jolly kind large late lazy light
    little lively lonely loud lucky mellow merry mild modest narrow neat noble odd old orange
    pale patient plain polite proud purple quick quiet rapid rare ripe rough round royal rustic
    salty sandy scarlet secret sharp shy silent simple sleepy slow small smooth snowy solid
    spare square steady stern stout strange sunny sweet swift tall tame tender thin tidy tiny
    vast velvet violet warm weary white wide wild wise
    """
)
_VERBS = _split(
    """
    admired borrowed brought built carried cleaned copied covered crossed described discovered
    dropped examined finished followed forgot found gathered guarded heard hid inspected kept
    left lifted measured mended missed moved noticed opened packed painted passed placed
    polished praised pulled pushed recognized remembered repaired sketched sold stored touched
    traded watched weighed
    """
)
_PEOPLE = _split(
    """
    apprentice baker captain carpenter clerk cook doctor farmer fisher gardener guide joiner
    judge librarian mason merchant miller musician neighbor nurse painter pilot porter potter
    sailor scout shepherd smith student surveyor teacher traveler visitor watchmaker weaver
    writer
    """
)
_WHEN = (
    "in the morning",
    "after the rain",
    "before winter came",
    "that same evening",
    "without a word",
    "for the second time",
    "as the sun went down",
    "during the long summer",
    "while everybody slept",
    "on the way home",
    "at the end of the week",
    "to the surprise of all",
)
_WHY = (
    "because nobody else had the time",
    "although the weather was poor",
    "since the old one was broken",
    "so that the others could rest",
    "as had been agreed the year before",
    "which made the whole village laugh",
    "and nobody ever asked why",
    "but it made little difference",
)
FIRST_NAMES = _split(
    """
    Ada Alma Anton Arthur Beatrice Bruno Carla Cecil Clara Conrad Dora Edgar Edith Elena Emil
    Erika Felix Flora Frida Gustav Hanna Harold Helga Henry Hilda Hugo Ida Igor Irma Ivan Jonas
    Judith Julius Karla Kurt Laura Leon Lydia Magnus Marta Matilda Max Mira Nadia Nils Nora Olga
    Oscar Otto Paula Petra Philip Rita Robert Rosa Rupert Selma Silas Sofia Stella Theo Thora
    Tilda Ulrich Vera Victor Viola Walter Wanda Werner Yara Zelda
    """
)
LAST_NAMES = _split(
    """
    Ackerley Ashdown Barlow Beckett Birchall Blackwood Bramley Brightwell Calder Carrow Coldwell
    Cresswell Dalby Darrow Denholm Eastgate Elmore Fairburn Farrow Fenwick Garside Glenister
    Greenhalgh Hale Harrowgate Hartwell Hollis Kershaw Kingsley Langdon Larkin Lindqvist
    Lockhart Marlow Mereworth Millbrook Norwood Oakes Ormsby Pemberton Penrose Quill Radcliffe
    Ravensworth Redfern Rowntree Sallow Selwyn Shelby Stanhope Sutcliffe Tarrant Thackeray
    Thornbury Underhill Vickers Wainwright Walden Westbrook Whitlock Wickham Winslow Yardley
    """
)
_TOWN_ENDS = ("ford", "ham", "ton", "bury", "mouth", "stead", "haven", "field", "bridge", "wick")
_TOWN_WHERE = ("", "Upper ", "Lower ", "Old ", "New ", "Great ", "Little ")
_TOWN_STARTS = _split(
    """
    Alder Ash Barn Birch Black Briar Brook Cald Crow Dun East Elm Fair Fern Fox Glen Gold Green
    Hart Hazel Heath Holm Iron King Lang Lin March Mill Moor North Oak Pen Raven Red Rose Salt
    Sand Sil Stan Stone Swan Thorn Wald West Whit Wind Wood Wych Yar
    """
)


_TOWNS = tuple(f"{a}{b}{c}" for a in _TOWN_WHERE for b in _TOWN_STARTS for c in _TOWN_ENDS)


def sentences(rng: Random) -> Iterator[str]:
    """Yield endless prose: sentences of 8 to 25 words without numbers or names."""
    while True:
        words = f"the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
        text = f"The {rng.choice(_PEOPLE)} {rng.choice(_VERBS)} {words}"
        shape = rng.randrange(5)
        if shape == 0:
            text = f"{rng.choice(_WHEN).capitalize()} t{text[1:]}"
        elif shape == 1:
            text = f"{text} {rng.choice(_WHEN)}"
        elif shape == 2:
            text = f"{text}, {rng.choice(_WHY)}"
        elif shape == 3:
            text = f"{text} near the {rng.choice(NOUNS)} and the {rng.choice(NOUNS)}"
        else:
            text = f"{text}, and the {rng.choice(_PEOPLE)} {rng.choice(_VERBS)} it"
            text = f"{text} {rng.choice(_WHEN)}, {rng.choice(_WHY)}"
        yield text + "."


def keys(rng: Random, n: int) -> list[str]:
    """N different names for hidden things, as in `quiet-lantern`."""
    pairs = rng.sample(range(len(ADJECTIVES) * len(NOUNS)), n)
    return [f"{ADJECTIVES[i // len(NOUNS)]}-{NOUNS[i % len(NOUNS)]}" for i in pairs]


def compounds(rng: Random, n: int) -> list[str]:
    """N different words made of two nouns, as in `lanternhill`."""
    count = len(NOUNS)
    pairs = (divmod(i, count) for i in rng.sample(range(count**2), min(2 * n + 8, count**2)))
    words = dict.fromkeys(NOUNS[a] + NOUNS[b] for a, b in pairs if a != b)
    assert len(words) >= n, f"asked for {n} words"
    return list(words)[:n]


def people(rng: Random, n: int) -> list[str]:
    """N different full names."""
    pairs = rng.sample(range(len(FIRST_NAMES) * len(LAST_NAMES)), n)
    count = len(LAST_NAMES)
    return [f"{FIRST_NAMES[i // count]} {LAST_NAMES[i % count]}" for i in pairs]


def towns(rng: Random, n: int) -> list[str]:
    """N different names of towns, as in `Alderford` and `Upper Alderford`."""
    return rng.sample(_TOWNS, n)


def town(rng: Random) -> str:
    """One name of a town."""
    return rng.choice(_TOWNS)


def number(rng: Random, n_digit: int = 7) -> str:
    """A number of n_digit digits."""
    return str(rng.randrange(10 ** (n_digit - 1), 10**n_digit))


def code(rng: Random) -> str:
    """A random UUID (version 4) in its usual form."""
    bits = rng.getrandbits(128) & ~(0xF << 76) & ~(0x3 << 62) | (4 << 76) | (2 << 62)
    digits = f"{bits:032x}"
    return "-".join(digits[a:b] for a, b in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32)))
