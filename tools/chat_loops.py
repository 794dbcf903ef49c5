"""How many answers of a chat are right, and how many go round in a circle, by sampler settings.

Run it as `python -m tamis.tools.chat_loops -m MODEL [NAME=VALUE ...]`. 32 questions, each of a new
conversation, with the sampler settings of `tamis chat` and those that are named, once for each
seed. An answer that reaches --most tokens counts as endless. The last line is JSON.
"""

import argparse
import dataclasses
import json
import re
import sys
import time

from tamis.cli.options import samplers
from tamis.engine.engine import Engine
from tamis.fetch import registry as models
from tamis.sampling.chain import SamplerParams

# A question, and the expression of a right answer, whatever its case.
QUESTIONS = (
    ("What is the capital of France?", r"paris"),
    ("How many legs does a spider have?", r"\b8\b|eight"),
    ("What colour is the sky on a clear day?", r"blue"),
    ("What is 2 + 2?", r"\b4\b|four"),
    ("Which planet is known as the Red Planet?", r"mars"),
    ("Who wrote Romeo and Juliet?", r"shakespeare"),
    ("What is the chemical formula of water?", r"h2o|h₂o|h_2"),
    ("How many days are in a week?", r"\b7\b|seven"),
    ("What is the largest ocean on Earth?", r"pacific"),
    ("At how many degrees Celsius does water boil?", r"\b100\b"),
    ("Which animal is called man's best friend?", r"\bdogs?\b"),
    ("What is the opposite of hot?", r"cold"),
    ("Name the first president of the United States.", r"washington"),
    ("How many minutes are in an hour?", r"\b60\b|sixty"),
    ("What is the square root of 81?", r"\b9\b|nine"),
    ("Which gas do plants take in from the air?", r"carbon dioxide|co2|co₂"),
    ("Name three primary colours.", r"red.*blue|blue.*red"),
    ("Give me a list of five fruits.", r"apple|banana|orange"),
    ("Write a Python function that adds two numbers.", r"return .*\+"),
    ("Explain in one sentence what gravity is.", r"force|attract|pull"),
    ("Translate 'good morning' into Spanish.", r"buenos d[ií]as"),
    ("What is the past tense of 'go'?", r"went"),
    ("Write a short poem about the sea.", r"sea|wave|ocean|blue"),
    ("What is photosynthesis?", r"light|sun"),
    ("List the days of the week.", r"monday.*friday"),
    ("How do I boil an egg?", r"water"),
    ("What does HTML stand for?", r"hyper ?text markup language"),
    ("Which country has Tokyo as its capital?", r"japan"),
    ("Write a Python loop that prints the numbers 1 to 10.", r"range\(1, ?11\)|range\(10\)"),
    ("What is the freezing point of water in Celsius?", r"\b0\b|zero"),
    ("Tell me a short story about a fox.", r"fox"),
    ("Why is exercise good for health?", r"health|heart|weight|mood"),
)


def main() -> None:
    """Ask all questions; print each answer and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--model", default="smollm2")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--most", type=int, default=1024, help="most tokens of an answer")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    arguments = parser.parse_args()
    engine = Engine.load(models.resolve(arguments.model))
    params = samplers.for_model(SamplerParams(), arguments, engine.path)
    params = dataclasses.replace(params, **_settings(arguments.settings))
    session = engine.session(n_ctx=arguments.most + 256)
    n_right = n_endless = n_tokens = 0
    start = time.monotonic()
    for seed in range(arguments.seeds):
        for question, wanted in QUESTIONS:
            session.truncate(0)
            ids = engine.encode_chat([{"role": "user", "content": question}])
            own = dataclasses.replace(params, seed=seed)
            pieces = list(session.generate(ids, own, max_tokens=arguments.most))
            text = "".join(piece.text for piece in pieces)
            right = re.search(wanted, text, re.I | re.S) is not None
            endless = pieces[-1].finish == "length"
            n_right, n_endless = n_right + right, n_endless + endless
            n_tokens += len(pieces)
            made = {"seed": seed, "question": question, "right": right, "endless": endless}
            print(json.dumps(made | {"tokens": len(pieces), "text": text}))
            sys.stdout.flush()
    print(
        json.dumps(
            {
                "model": arguments.model,
                "settings": arguments.settings,
                "answers": arguments.seeds * len(QUESTIONS),
                "right": n_right,
                "endless": n_endless,
                "tokens": n_tokens,
                "seconds": round(time.monotonic() - start, 1),
            }
        )
    )


def _settings(pairs: list[str]) -> dict[str, int | float]:
    """The settings of NAME=VALUE pairs."""
    found: dict[str, int | float] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        found[name] = float(value) if "." in value else int(value)
    return found


if __name__ == "__main__":
    main()
