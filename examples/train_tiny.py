"""Train the two tiny models that come with minserve: `tiny`, and `tiny-draft`, which is to guess what it will say.

    .venv/bin/pip install -e '.[train]'
    .venv/bin/python examples/train_tiny.py --out tiny_models

It takes about an hour on two cores, and writes the two models as GGUF files and a model card that says what
they are worth. Stop it with Ctrl-C and start it again: it goes on from its last checkpoint.

Weights and data are drawn from the seed, and a step's data from the seed and the step alone. Another number of
threads, another processor or another version of PyTorch adds in another order, so the weights will differ in their
last digits at first and everywhere in the end; what they are worth should not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tiny_training.card import write_card
from tiny_training.data import TrainingData, make_vocabulary
from tiny_training.evaluate import Evaluation
from tiny_training.export import export
from tiny_training.loop import Recipe, Training

from minserve.commands.arguments import at_least
from minserve.commands.output import note, say
from minserve.commands.progress import StageProgress
from minserve.errors import MinserveError
from minserve.model.config import ModelConfig
from minserve.text.tokenizer import Tokenizer

CONTEXT = 512


def _config(**sizes: int) -> ModelConfig:
    return ModelConfig(vocab_size=1024, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=True, **sizes)


TARGET, DRAFT = "tiny", "tiny-draft"
RECIPES = {
    TARGET: Recipe(
        _config(
            hidden_size=192, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2, intermediate_size=512
        ),
        steps=3200,
        rows=16,
        rate=4e-3,
    ),
    # Few exercises, so that it knows the easy ones. Text it learns from the target almost from the beginning, because
    # it is to guess what the target says, not what is right.
    DRAFT: Recipe(
        _config(
            hidden_size=96, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, intermediate_size=192
        ),
        steps=3200,
        rows=16,
        rate=1e-2,
        text_share=0.75,
        distil=0.1,
    ),
}
DESCRIPTIONS = {
    TARGET: "A small model that comes with minserve: lines in the manner of Shakespeare, and short exercises.",
    DRAFT: "A tenth of tiny, on the same tokens: guesses what tiny will say, and answers what is easy.",
}


def main() -> int:
    """Train what is not trained yet, then export and measure it."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("tiny_models"), help="where everything goes (tiny_models)")
    parser.add_argument("--threads", type=at_least(1), default=2, help="threads (2)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (0)")
    parser.add_argument(
        "--steps", type=at_least(1), help="so few of each model, for a quick look; they are then worth nothing"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    vocabulary = make_vocabulary(args.seed)
    tokenizer = Tokenizer(vocabulary)
    evaluation = Evaluation(tokenizer)
    trained: dict[str, Training] = {}
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, recipe in RECIPES.items():
            if args.steps is not None:
                recipe = recipe.shortened(args.steps)
            trained[name] = _train(name, recipe, args, tokenizer, evaluation, trained.get(TARGET))
    except KeyboardInterrupt:
        note(f"interrupted; the same command goes on from {args.out}")
        return 130
    except (MinserveError, OSError) as error:
        note(f"error: {error}")
        return 2
    files = {name: args.out / f"{name}.gguf" for name in RECIPES}
    for name, path in files.items():
        network = trained[name].network
        export(path, network.state_dict(), network.config, vocabulary, name=name, description=DESCRIPTIONS[name])
    parameters = " | ".join(f"{sum(p.numel() for p in t.network.parameters()):,}" for t in trained.values())
    tokens = " | ".join(f"{t.recipe.steps * t.recipe.rows * 256:,}" for t in trained.values())
    minutes = " | ".join(f"{t.seconds / 60:.0f}" for t in trained.values())
    facts = {
        "parameters": parameters,
        "trained on, tokens": tokens,
        f"training took, minutes (threads: {args.threads})": minutes,
    }
    with StageProgress("the models", opening="measuring") as progress:
        write_card(args.out / "MODEL_CARD.md", files, facts, progress, quick=args.steps is not None)
    say(f"{', '.join(map(str, files.values()))} and {args.out / 'MODEL_CARD.md'} are written")
    return 0


def _train(
    name: str,
    recipe: Recipe,
    args: argparse.Namespace,
    tokenizer: Tokenizer,
    evaluation: Evaluation,
    teacher: Training | None,
) -> Training:
    """Train a model to its end, from where it stands."""
    training = Training(name, recipe, args.out, args.seed)

    def data(length: int) -> TrainingData:
        rows = recipe.rows * 256 // length
        return TrainingData(tokenizer, length=length, rows=rows, seed=args.seed, text_share=recipe.text_share)

    with StageProgress(name, opening="training") as progress:
        training.run(data, evaluation, progress, teacher=None if teacher is None else teacher.network)
    return training


if __name__ == "__main__":
    sys.exit(main())
