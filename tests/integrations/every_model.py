"""Compares every text model of the installed transformers, made small, with its own eager attention.

    python tests/integrations/every_model.py [MODEL_TYPE ...]

Whatever is built from its default configuration with the sizes below, and takes token ids, is called without a mask
and with padding right and left. Prints a line for each model, and ends with the status 1 where one with fastattn is
another, or fails alone otherwise than by a refusal. Run it for each new version of transformers; it takes ten minutes.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import multiprocessing
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from types import FrameType

import torch
import torchvision_import  # noqa: F401
import transformers
from model_cases import PADDINGS
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers_cases import ids, masked, mirrored

import fastattn  # noqa: F401  which transformers knows then

SIZES = {
    32: "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim encoder_hidden_size decoder_hidden_size",
    48: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner hidden_dim moe_intermediate_size "
    "shared_expert_intermediate_size ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_experts_per_tok",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts moe_num_experts sliding_window attention_window local_attention",
    8: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim query_pre_attn_scalar hidden_size_per_layer_input",
    16: "kv_lora_rank q_lora_rank qk_head_dim",
    64: "max_position_embeddings n_positions max_source_positions max_target_positions",
    99: "vocab_size vocab_size_per_layer_input",
    1: "eos_token_id n_group topk_group first_k_dense_replace encoder_sparse_step decoder_sparse_step",
    0: "pad_token_id bos_token_id decoder_start_token_id layerdrop",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
MOST_PARAMETERS = 2 * 10**7
LIMIT_S = 60
PASSED = ("same", "refused", "refused when called", "not made", "not called")


def every_model(chosen: list[str]) -> Iterator[str]:
    """The names of the classes of these model types, or of all."""
    tables = ("MODEL_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING")
    pairs = [pair for table in tables for pair in getattr(modeling_auto, f"{table}_NAMES").items()]
    names = (name for kind, classes in pairs for name in ([classes] if isinstance(classes, str) else classes[:1])
             if not chosen or kind in chosen)  # fmt: skip
    yield from dict.fromkeys(names)


def make_small(config: PreTrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            make_small(value)
        elif type(value) in (int, float) and name in SMALL:
            setattr(config, name, SMALL[name])
        elif name == "layer_types" and isinstance(value, list):
            config.layer_types = (list(dict.fromkeys(value)) * 2)[:2]  # one layer of each kind
    if hasattr(config, "kv_lora_rank"):
        config.num_key_value_heads = 4


def made(cls: type[PreTrainedModel], implementation: str) -> PreTrainedModel:
    config = cls.config_class()
    make_small(config)
    with torch.device("meta"):
        size = sum(x.numel() for x in cls(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    torch.manual_seed(0)
    return cls._from_config(config, attn_implementation=implementation).eval()


def outputs(model: PreTrainedModel, real: Tensor | None) -> dict[str, Tensor]:
    """What stands at real tokens."""
    takes, call = inspect.signature(model.forward).parameters, {"input_ids": ids(), **masked(real)}
    if "decoder_input_ids" in takes:
        call |= {"decoder_input_ids": ids(2), **masked(mirrored(real), "decoder_attention_mask")}
    call |= {"use_cache": False} if "use_cache" in takes else {}
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(**call)
    rows = {"encoder_last_hidden_state": real}
    last = mirrored(real) if "decoder_input_ids" in takes else real
    rows |= dict.fromkeys(("last_hidden_state", "logits"), last)
    found = ((name, getattr(output, name, None), of) for name, of in rows.items())
    return {name: x if of is None or x.shape[:2] != of.shape else x[of] for name, x, of in found if x is not None}


def compared(name: str) -> str:
    """One of `PASSED` with the reason, or what is wrong."""
    models: list[PreTrainedModel] = []
    for implementation in ("eager", "fastattn"):
        try:
            models.append(made(getattr(transformers, name), implementation))
        except Exception as error:  # whatever a model says of sizes that it was not meant for
            refused = models and isinstance(error, ValueError) and "attn_implementation must be" in str(error)
            return f"{'refused' if refused else 'not made'}: {error}"
    for padding in ("none", "right", "left"):
        results = []
        for model in models:
            try:
                results.append(outputs(model, PADDINGS[padding]))
            except Exception as error:
                results.append(error)
        expected, actual = results
        if isinstance(expected, Exception):
            return f"not called: {expected}"
        if isinstance(actual, Exception):
            return (
                f"{'refused when called' if isinstance(actual, NotImplementedError) else f'WRONG, {padding}'}: {actual}"
            )
        for of, x in expected.items():
            error, size = (actual[of].double() - x.double()).abs().max().item(), x.abs().max().item()
            if not error <= 2e-5 * max(size, 1):
                return f"WRONG, {padding}: {of} is off by {error:.1e}, of {size:.1e}"
    return "same"


class NoEnd(BaseException):
    """Is raised in a model that takes too long."""


def in_time(name: str) -> tuple[str, str]:
    def end(number: int, frame: FrameType | None) -> None:
        raise NoEnd(f"no end in {LIMIT_S} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_S)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return name, compared(name)
    except NoEnd as error:
        return name, f"not called: {error}"
    finally:
        signal.alarm(0)


def main() -> int:
    """1 where a model with fastattn is another, else 0."""
    counts: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=40) as processes:
        for name, finding in processes.imap(in_time, every_model(sys.argv[1:])):
            print(f"{name}: {' '.join(finding.split())[:160]}", flush=True)
            counts[finding.partition(":")[0].partition(",")[0]] += 1
    print(", ".join(f"{count} {finding}" for finding, count in sorted(counts.items())))
    return int(bool(counts.keys() - set(PASSED)) or not counts["same"])


if __name__ == "__main__":
    sys.exit(main())
