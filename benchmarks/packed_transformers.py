"""Prints what `fastattn.swap(model, packed=True)` gains on MiniLM, on sentences of mixed length, on the CPU.

`transformers` is the model as it is (sdpa). All have the same weights and take turns. Before anything is timed, the
embeddings are held to those of the model in fp64: at most twice as far off as transformers' own, plus 4 eps.

The sentences are the documentation of fastattn. fill is the part of a batch that is not padding: where all tokens cost
the same, nothing but leaving padding out is worth 1 / fill.

    python benchmarks/packed_transformers.py [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
from functools import partial

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

import fastattn
from fastattn.bench.timing import Call, interleave
from fastattn.bench.writing import file_to_write, write_rows
from fastattn.demo import Batches, bundled_model, documentation, sentences_in
from fastattn.testing import compare

BATCH, SENTENCES, ENCODED = 32, 96, 256
SECONDS = 180.0  # for each line, of which a round may take ten


class Classifier(nn.Module):
    """Two classes from the first token's last hidden state."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, **inputs: Tensor) -> Tensor:
        """Logits [B, 2]."""
        return self.head(self.encoder(**inputs).last_hidden_state[:, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="keep every sample here")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each line (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    folder = bundled_model()
    model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    sentences = sentences_in(documentation())
    batches = Batches.of(sentences[:SENTENCES], AutoTokenizer.from_pretrained(folder), BATCH, 512, "cpu")
    fill = batches.real / batches.padded
    models = {"transformers": model, "swapped": copy.deepcopy(model), "packed": copy.deepcopy(model)}
    fastattn.swap(models["swapped"])
    fastattn.swap(models["packed"], packed=True)
    for name in ("swapped", "packed"):
        _check(models[name], model, batches)
    print(
        f"MiniLM, fp32, {SENTENCES} sentences in batches of {BATCH} as they come: fill {fill:.3f} = 1 / {1 / fill:.2f}"
    )

    lines = {
        "embeddings": ({name: Call(partial(_embed, one, batches)) for name, one in models.items()}, 1.1 / fill),
        "fine-tuning step, forward, backward and AdamW": (
            {name: Call(_fine_tuning(one, batches)) for name, one in models.items()},
            1 / fill,
        ),
        f"SentenceTransformer.encode, {ENCODED} sentences, sorted by length": (_encoders(sentences[:ENCODED]), 1.0),
    }
    rows = []
    for what, (calls, target) in lines.items():
        timings = interleave(calls, args.seconds, "cpu")
        before, after = timings["transformers"].median, timings["packed"].median
        print(f"{what}: " + ", ".join(f"{name} {1e3 * timing.median:.0f} ms" for name, timing in timings.items()))
        verdict = "met" if before / after >= target else "not met"
        print(f"    packed is {before / after:.2f} times as fast (target {target:.2f}: {verdict})", flush=True)
        seconds = {name: timing.seconds for name, timing in timings.items()}
        rows.append({"what": what, "fill": fill, "target": target, "seconds": seconds})
    write_rows(args.json, rows)


def _check(ours: nn.Module, theirs: nn.Module, batches: Batches) -> None:
    """Stops everything if our embeddings are not as near to fp64 as theirs."""
    actual, naive, exact = (_embed(model, batches) for model in (ours, theirs, copy.deepcopy(theirs).double()))
    error = compare("embeddings", actual, naive, exact)
    if not error.right:
        raise SystemExit(str(error))


@torch.inference_mode()
def _embed(model: nn.Module, batches: Batches) -> Tensor:
    """[sentences, E]: the mean of the last hidden states over the real tokens."""
    means = []
    for inputs in batches.inputs:
        real = inputs["attention_mask"].bool()[..., None]
        means.append(model(**inputs).last_hidden_state.where(real, 0).sum(1) / real.sum(1))
    return torch.cat(means)


def _fine_tuning(model: nn.Module, batches: Batches) -> partial:
    """A step on each of the batches, by turns all of them: the model in training, without dropout."""
    torch.manual_seed(0)
    classifier = Classifier(copy.deepcopy(model)).train()
    for module in classifier.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(classifier.parameters(), 1e-6, fused=True)
    return partial(_steps, classifier, optimizer, batches)


def _steps(classifier: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for inputs in batches.inputs:
        optimizer.zero_grad()
        labels = inputs["attention_mask"].sum(1) % 2
        nn.functional.cross_entropy(classifier(**inputs), labels).backward()
        optimizer.step()


def _encoders(sentences: list[str]) -> dict[str, Call]:
    models = {
        name: SentenceTransformer(bundled_model(), device="cpu") for name in ("transformers", "swapped", "packed")
    }
    fastattn.swap(models["swapped"])
    fastattn.swap(models["packed"], packed=True)
    return {name: Call(partial(model.encode, sentences, show_progress_bar=False)) for name, model in models.items()}


if __name__ == "__main__":
    main()
