"""Prints what packing gains: an encoder on a padded batch, fastattn.nn's beside torch.nn's, on the CPU.

All have the same weights and take turns. `torch` is torch.nn.TransformerEncoder as it is (in eval it packs too, into
nested tensors), `torch padded` the same with enable_nested_tensor=False, `swapped` the first after fastattn.swap.
Before anything is timed, the outputs at real tokens are held to fp64: at most twice as far off as those of torch, plus
4 eps. A training step is forward, backward and AdamW.

    python benchmarks/padding_free.py [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
from torch import Tensor, nn

import fastattn
from fastattn.bench.timing import Call, interleave
from fastattn.bench.writing import file_to_write, write_rows
from fastattn.testing import compare

LAYERS, WIDTH, HEADS, INNER = 6, 512, 8, 2048
BATCH, SHORTEST, LONGEST = 16, 64, 256
SECONDS = 60.0  # for each line
MODES = {"inference": None, "training step": 0.0, "training step, dropout 0.1": 0.1}
TARGETS = {"inference": {"torch": 1.0, "torch padded": 1.6}, "training step": {"torch": 1.7}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="keep every sample here")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each line (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    lengths = torch.linspace(SHORTEST, LONGEST, BATCH).long()
    padding = torch.arange(LONGEST) >= lengths[:, None]
    print(f"{LAYERS} layers, {WIDTH} wide, batch {BATCH}, fill {1 - padding.float().mean():.3f}, fp32")
    rows = []
    for mode, dropout in MODES.items():
        timings = interleave(calls(mode, dropout or 0.0, padding), args.seconds, "cpu")
        samples = {name: timing.seconds for name, timing in timings.items()}
        medians = {name: timing.median for name, timing in timings.items()}
        print(f"{mode}: " + ", ".join(f"{name} {1e3 * median:.0f} ms" for name, median in medians.items()), flush=True)
        for rival, target in TARGETS.get(mode, {"torch": 1.7}).items():
            for ours in ("fastattn", "swapped"):
                ratio = medians[rival] / medians[ours]
                met = "met" if ratio >= target else "not met"
                print(f"    {ours} is {ratio:.2f} times as fast as {rival} (target {target:.1f}: {met})", flush=True)
        rows.append({"mode": mode, "seconds": samples})
    write_rows(args.json, rows)


def calls(mode: str, dropout: float, padding: Tensor) -> dict[str, Call]:
    """The call of each contender, on inputs that are the same each time."""
    torch.manual_seed(0)
    x = torch.randn(*padding.shape, WIDTH)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout, batch_first=True)
    models = {
        "torch": nn.TransformerEncoder(layer, LAYERS),
        "torch padded": nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
    }
    models["swapped"] = copy.deepcopy(models["torch"])
    fastattn.swap(models["swapped"])
    layer = fastattn.nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, dropout, batch_first=True)
    models["fastattn"] = fastattn.nn.TransformerEncoder(layer, LAYERS)
    models["fastattn"].load_state_dict(models["torch"].state_dict())
    for name in ("swapped", "fastattn"):
        _check(models[name], models["torch"], x, padding)
    if mode == "inference":
        models = {name: model.eval() for name, model in models.items()}
        return {name: Call(partial(_inference, model, x, padding)) for name, model in models.items()}
    return {
        name: Call(partial(_training_step, model.train(), torch.optim.AdamW(model.parameters(), 1e-5), x, padding))
        for name, model in models.items()
    }


def _check(ours: nn.Module, theirs: nn.Module, x: Tensor, padding: Tensor) -> None:
    """Stops everything if our output is not as near to fp64 as theirs."""
    real = ~padding
    with torch.no_grad():
        ours, theirs = copy.deepcopy(ours).eval(), copy.deepcopy(theirs).eval()
        actual, naive = (model(x, src_key_padding_mask=padding)[real] for model in (ours, theirs))
        exact = theirs.double()(x.double(), src_key_padding_mask=padding)[real]
    error = compare("output", actual, naive, exact)
    if not error.right:
        raise SystemExit(str(error))


@torch.no_grad()
def _inference(model: nn.Module, x: Tensor, padding: Tensor) -> None:
    model(x, src_key_padding_mask=padding)


def _training_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, padding: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    output = model(x, src_key_padding_mask=padding)
    output.masked_fill(padding[..., None], 0).square().mean().backward()
    optimizer.step()


if __name__ == "__main__":
    main()
