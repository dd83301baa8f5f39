"""Training a swapped model, by whatever loop people use, takes the course that it takes with the model's own attention.

A course is the losses of 16 steps on padded batches, and the trainable parameters after the last. How far it may be
from that in fp64 is told by how far transformers' own attentions are, in the dtype of the loop. Dropout is 0: what it
drops is drawn elsewhere.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import accelerate
import lightning
import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers_cases import SIZES, exact, made

import fastattn

STEPS, BATCH, L = 16, 8, 16
RATE = 5e-3
WITH_PADDING = SIZES | {"pad_token_id": 0}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> transformers.PreTrainedModel:
    return made("BertForSequenceClassification", WITH_PADDING | UNDROPPED | {"num_labels": 3})


def llama() -> transformers.PreTrainedModel:
    return made("LlamaForCausalLM", WITH_PADDING | {"num_key_value_heads": 2, "use_cache": False})


def samples(make: Callable[[], nn.Module]) -> list[dict[str, Tensor]]:
    """Something to learn, 3 to 16 tokens each: which kind the first token is of, or how the tokens go on."""
    generator = torch.Generator().manual_seed(0)

    def drawn(first: int, end: int, shape: tuple[int, ...] = ()) -> Tensor:
        return torch.randint(first, end, shape, generator=generator)

    result = []
    for _ in range(STEPS * BATCH):
        n = int(drawn(3, L + 1))
        if make is bert:
            real = torch.arange(L) < n
            ids = drawn(3, 9, (L,))
            labels = ids[0] % 3
        else:
            real = torch.arange(L) >= L - n
            ids = 3 + (drawn(0, 12) + torch.arange(L) * drawn(1, 3)) % 12
            labels = ids.where(real & real.roll(1), -100)  # what tells the first token is padding
        result.append({"input_ids": ids.where(real, 0), "attention_mask": real.long(), "labels": labels})
    return result


def plain(model: nn.Module, data: list, folder: Path, half: bool) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], RATE)
    for batch in DataLoader(data, BATCH):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def by_accelerate(model: nn.Module, data: list, folder: Path, half: bool) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # else the first one in a process decides for all
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16" if half else "no", gradient_accumulation_steps=2
    )
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), RATE), DataLoader(data, BATCH)
    )
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


class LightningModel(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), RATE)


def by_lightning(model: nn.Module, data: list, folder: Path, half: bool) -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, precision="bf16-mixed" if half else None, gradient_clip_val=1.0,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LightningModel(model.train()), DataLoader(data, BATCH))


def by_trainer(
    model: nn.Module, data: list, folder: Path, half: bool, resume: str | None = None, **arguments: object
) -> None:
    options = {
        "output_dir": str(folder), "use_cpu": True, "bf16": half, "max_steps": STEPS, "learning_rate": RATE,
        "per_device_train_batch_size": BATCH, "save_strategy": "no", "logging_strategy": "no", "report_to": [],
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    trainer = transformers.Trainer(model, transformers.TrainingArguments(**options | arguments), train_dataset=data)
    trainer.train(resume_from_checkpoint=resume)


def checkpointed(reentrant: bool) -> Callable[..., None]:
    return functools.partial(
        by_trainer, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )


LOOPS = {
    "plain": plain,
    "accelerate": by_accelerate,
    "lightning": by_lightning,
    "trainer": by_trainer,
    "trainer, checkpointed": checkpointed(reentrant=False),
    "trainer, checkpointed, reentrant": checkpointed(reentrant=True),
}


def lora(model: transformers.PreTrainedModel) -> nn.Module:
    """The model with trainable adapters at its queries and values, and all else frozen."""
    names = ["query", "value"] if model.config.model_type == "bert" else ["q_proj", "v_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules=names))


class Prepared(NamedTuple):
    model: nn.Module
    report: fastattn.SwapReport | None = None


def model_of(make: Callable[[], nn.Module], attention: str, adapt: Callable[[nn.Module], nn.Module]) -> Prepared:
    """The model with that attention: "eager", "sdpa", "exact" (in fp64), "swapped" or "packed"."""
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():  # so that attention is far from uniform
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    model = adapt(model)
    if attention == "exact":
        return Prepared(exact(model))
    if attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        return Prepared(model)
    report = fastattn.swap(model, packed=attention == "packed")
    assert len(report.swapped) == 2
    assert not report.refused
    return Prepared(model, report)


@dataclass(frozen=True)
class Course:
    """losses: [calls of the model]; before, after: by name, the parameters that are trained."""

    losses: Tensor
    before: dict[str, Tensor]
    after: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, train: Callable[[], None]) -> Course:
        losses: list[Tensor] = []
        hook = model.register_forward_hook(lambda _, args, output: losses.append(output.loss.detach().double()))
        before = _trained(model)
        train()
        hook.remove()
        return cls(torch.stack(losses), before, _trained(model))

    def distance(self, other: Course) -> Tensor:
        """[2]: the largest between losses, and the root mean square between parameters after the last step."""
        return torch.stack([(self.losses - other.losses).abs().max(), _between(self.after, other.after)])

    def moved(self) -> Tensor:
        """[2]: the same, between the lowest and the highest loss, and between first and last parameters."""
        return torch.stack([self.losses.max() - self.losses.min(), _between(self.before, self.after)])


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().double().clone() for name, p in model.named_parameters() if p.requires_grad}


def _between(one: dict[str, Tensor], other: dict[str, Tensor]) -> Tensor:
    """Without the bias of keys: that has no gradient but rounding, of which AdamW makes whole steps."""
    names = [name for name in one if not name.endswith("key.bias")]
    return torch.cat([(one[name] - other[name]).flatten() for name in names]).square().mean().sqrt()


Setting = tuple[str, Callable[[], nn.Module], bool, Callable[[nn.Module], nn.Module]]  # loop, model, bf16, adapters


def as_it_is(model: nn.Module) -> nn.Module:
    return model


@functools.cache
def own_courses(setting: Setting) -> dict[str, Course]:
    """What transformers' own attention does, and that in fp64."""
    courses = {}
    loop, make, half, adapt = setting
    for attention in ("eager", "sdpa", "exact"):
        model = model_of(make, attention, adapt).model
        train = functools.partial(LOOPS[loop], model.train(), samples(make), Path(), half and attention != "exact")
        courses[attention] = Course.of(model, train)
    return courses


def assert_as_good(actual: Course, own: dict[str, Course]) -> None:
    """Twice as far from fp64 as eager attention or sdpa, whichever is farther, and 4 eps, at most."""
    right = own["exact"]
    for course in (actual, own["eager"]):
        assert course.losses.shape == right.losses.shape
        assert course.after.keys() == right.after.keys()
    tolerated = torch.maximum(own["eager"].distance(right), own["sdpa"].distance(right))
    largest = torch.stack([right.losses.abs().max(), max(p.abs().max() for p in right.after.values())])
    budget = 2 * tolerated + 4 * torch.finfo(torch.float32).eps * largest
    assert (5 * budget < right.moved()).all(), "rounding is not small beside what was learnt"
    assert (actual.distance(right) <= budget).all(), f"losses, parameters: {actual.distance(right)}, budget {budget}"


SETTINGS: list[Setting] = [
    ("plain", bert, True, as_it_is),
    ("plain", llama, False, as_it_is),
    ("accelerate", llama, True, as_it_is),
    ("lightning", llama, True, as_it_is),
    ("trainer", bert, False, as_it_is),
    ("trainer, checkpointed, reentrant", bert, True, as_it_is),
    ("plain", llama, False, lora),
    ("trainer, checkpointed", llama, True, lora),
]


def _named(value: object) -> str | None:
    return value.__name__ if callable(value) else {True: "bf16", False: "fp32"}.get(value)


@pytest.mark.parametrize("attention", ["swapped", "packed"])
@pytest.mark.parametrize(("loop", "make", "half", "adapt"), SETTINGS, ids=_named)
def test_the_course(loop, make, half, adapt, attention, tmp_path):
    own = own_courses((loop, make, half, adapt))
    model, report = model_of(make, attention, adapt)
    passes = []
    attention_modules = [module for name, module in model.named_modules() if name.endswith((".self", ".self_attn"))]
    attention_modules[0].register_forward_hook(lambda *_: passes.append(None))
    actual = Course.of(model, functools.partial(LOOPS[loop], model.train(), samples(make), tmp_path, half))
    assert_as_good(actual, own)
    assert len(passes) == len(actual.losses) * (2 if "checkpointed" in loop else 1)
    if attention == "packed":
        assert report.calls.packed >= len(actual.losses)
        assert not report.calls.unpacked


@pytest.mark.parametrize("attention", ["swapped", "packed"])
def test_a_checkpoint_in_the_middle(attention, tmp_path):
    """Going on from it gives the same bits; and a model with eager attention goes on from it too."""
    own = own_courses(("trainer", bert, False, as_it_is))
    saved = {"save_strategy": "steps", "save_steps": STEPS // 2}

    def train(attention: str, **arguments: object) -> Course:
        model = model_of(bert, attention, as_it_is).model
        return Course.of(model, lambda: by_trainer(model.train(), samples(bert), tmp_path, False, **arguments))

    whole = train(attention, **saved)
    middle = str(tmp_path / f"checkpoint-{STEPS // 2}")
    assert "fastattn" not in json.loads((Path(middle) / "config.json").read_text()).values()
    continued = train(attention, resume=middle)
    assert torch.equal(continued.losses, whole.losses[STEPS // 2 :])
    assert all(torch.equal(continued.after[name], whole.after[name]) for name in whole.after)
    by_eager = train("eager", resume=middle)
    losses = torch.cat([whole.losses[: STEPS // 2], by_eager.losses])
    assert_as_good(Course(losses, whole.before, by_eager.after), own)


def test_adapters_are_saved_and_loaded(tmp_path):
    trained = model_of(llama, "packed", lora).model
    plain(trained.train(), samples(llama)[: 5 * BATCH], tmp_path, False)
    trained.save_pretrained(tmp_path)
    base = model_of(llama, "swapped", as_it_is).model
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    adapters = {name: p for name, p in trained.named_parameters() if "lora_" in name}
    assert {name: p for name, p in loaded.named_parameters() if "lora_" in name}.keys() == adapters.keys()
    batch = next(iter(DataLoader(samples(llama), BATCH)))
    real = batch["attention_mask"].bool()
    actual, expected = (model.eval()(**batch).logits[real] for model in (loaded, trained))
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(model_of(llama, "swapped", as_it_is).model.eval()(**batch).logits[real], expected)
