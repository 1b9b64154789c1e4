"""Words that tasks are made of."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Ada Alan Amir Anna Ben Bella Carl Chloe Clara David Diana Edith Elena Emil Emma Felix Fiona Frank Grace Hanna "
    "Hugo Ida Igor Iris Ivan Jack Jane Jonas Julia Karl Kate Laura Leo Lena Lucas Maria Mark Mia Nina Noah Nora Olga "
    "Oscar Otto Paul Peter Petra Rosa Ruth Sam Sara Simon Sofia Theo Tina Tom Uma Vera Victor Zoe"
)
CITIES = _words(
    "Athens Berlin Bern Boston Cairo Delhi Dublin Geneva Kyoto Lagos Lima Lisbon London Madrid Milan Moscow Naples "
    "Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia Tokyo Turin Venice Vienna Warsaw Zagreb"
)
JOBS = _words(
    "baker barber butcher carpenter cook doctor driver farmer gardener judge lawyer mason miller nurse painter "
    "pilot poet priest sailor singer smith soldier tailor teacher weaver"
)
THINGS = _words(
    "ant bag bat bed bee bell boat book box bread cake cat coat cow cup dog door dress duck egg fish flag fox gate "
    "goat hat hen horse key king knife lamp leaf lion moon mouse nest nut owl pen pig plate queen rain ring road rose "
    "salt ship shoe snow spoon star stone sun sword table tree wall wolf wood"
)
_ONSETS = _words(
    "b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sc sh sl sm sn sp st str t th tr v w z"
)
_VOWELS = _words("a e i o u a e i o u ai ea ee oa oo ou")
_CODAS = _words("b ck d f g l ld lf ll lt m mp n nd ng nk nt p r rd rk rm rn rt s sh ss st t th tt x")


def made_up_word(rng: random.Random, length: int) -> str:
    """A word of that many letters that could be English, and mostly is none."""
    word = ""
    while len(word) < length:
        word += rng.choice(_ONSETS) + rng.choice(_VOWELS)
        if rng.random() < 0.5:
            word += rng.choice(_CODAS)
    return word[:length]
