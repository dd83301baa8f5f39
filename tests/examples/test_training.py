"""The training loop of the examples: killed and resumed is the same run, and what is damaged is said in a sentence."""

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import fresh_python
import pytest
import torch
from torch import nn

from examples import training
from examples.training import InputError, Loss, Run, exit_code, inverse_sqrt, seed_everything, train

EXAMPLES = 12


def train_small(folder, *, width=4, epochs=3, seed=0, settings=None, kill_at=None, before_kill=None, figures=None):
    """(model, metrics, what was evaluated) of a run with dropout, shuffled batches and every kind of state.

    kill_at: the number of the batch, over the whole run, at which `before_kill` is called instead of the loss.
    """
    seed_everything(seed)
    inputs, targets = torch.randn(EXAMPLES, 3), torch.randn(EXAMPLES, 1)
    model = nn.Sequential(nn.Linear(3, width), nn.Dropout(0.5), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    evaluated, seen = [], [0]

    def batches(generator):
        return torch.randperm(EXAMPLES, generator=generator).split(2)

    def loss(batch):
        seen[0] += 1
        if seen[0] == kill_at:
            before_kill()
        noise = random.random() / 10
        return Loss(nn.functional.mse_loss(model(inputs[batch]) + noise, targets[batch]), len(batch), 3 * len(batch))

    def evaluate(epoch):
        assert not model.training
        assert not torch.is_grad_enabled()
        evaluated.append(epoch)
        return figures or {"valid": nn.functional.mse_loss(model(inputs), targets).item()}

    metrics = train(
        model,
        optimizer,
        run=Run(folder, epochs, seed, checkpoint_every=2, settings=settings or {}),
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        schedule=inverse_sqrt(optimizer, 4),
        clip_norm=1.0,
    )
    return model, metrics, evaluated


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


class Killed(Exception):  # noqa: N818 (it is no error)
    pass


def kill():
    raise Killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train_small(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("at", [1, 4, 6, 7, 11, 18])  # 6 batches an epoch: the first, the middle, both sides of an end
def test_a_resumed_run_equals_the_whole_one_to_the_bit(tmp_path, whole, at):
    with pytest.raises(Killed):
        train_small(tmp_path, kill_at=at, before_kill=kill)
    model, metrics, _ = train_small(tmp_path)
    assert same_weights(model, whole[0])
    for name in ("history", "steps", "tokens", "epochs"):
        assert metrics[name] == whole[1][name]


def test_another_seed_is_another_run(tmp_path, whole):
    assert not same_weights(train_small(tmp_path, seed=1)[0], whole[0])


def train_one_weight(folder, *, batches, loss, epochs=1, lr=0.0, clip_norm=None):
    """(weight, metrics) of plain gradient descent on a weight that begins at 0; `loss` is given it and the batch."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    metrics = train(
        model, torch.optim.SGD(model.parameters(), lr), run=Run(folder, epochs), batches=batches,
        loss=lambda batch: loss(model.weight.sum(), batch), evaluate=lambda epoch: {}, clip_norm=clip_norm,
    )  # fmt: skip
    return model.weight.item(), metrics


def test_each_epoch_draws_its_own_batches(tmp_path):
    drawn = []

    def batches(generator):
        drawn.append(torch.randperm(100, generator=generator).tolist())
        return [0]

    train_one_weight(tmp_path, batches=batches, loss=lambda weight, batch: Loss(weight, 1, 1), epochs=3)
    assert len(set(map(tuple, drawn))) == 3


def test_large_gradients_are_clipped(tmp_path):
    def loss(weight, batch):
        return Loss(100 * weight, 1, 1)

    assert train_one_weight(tmp_path / "free", batches=lambda generator: [0], loss=loss, lr=1.0)[0] == -100
    clipped, _ = train_one_weight(tmp_path / "clipped", batches=lambda generator: [0], loss=loss, lr=1.0, clip_norm=0.5)
    assert clipped == pytest.approx(-0.5, rel=1e-4)


def test_a_process_that_is_killed_leaves_a_run_that_resumes(tmp_path, whole):
    program = f"""
        import os, signal, sys
        from pathlib import Path
        sys.path[:0] = [{str(Path(__file__).parent)!r}]
        from test_training import train_small
        train_small(Path({str(tmp_path)!r}), kill_at=10, before_kill=lambda: os.kill(os.getpid(), signal.SIGKILL))
    """
    ended = fresh_python.run(program)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    model, _, evaluated = train_small(tmp_path)
    assert same_weights(model, whole[0])
    assert evaluated == [2, 3]


def test_a_finished_run_is_left_alone_and_goes_on_with_more_epochs(tmp_path, whole):
    train_small(tmp_path, epochs=2)
    _, metrics, evaluated = train_small(tmp_path, epochs=2)
    assert evaluated == []
    assert metrics["epochs"] == 2
    model, _, evaluated = train_small(tmp_path, epochs=3)
    assert evaluated == [3]
    assert same_weights(model, whole[0])


def test_being_killed_while_a_checkpoint_is_written_loses_only_that_one(tmp_path, whole, monkeypatch):
    replace, written = os.replace, []

    def replace_or_die(source, target):
        written.append(target)
        if len(written) == 3:
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_or_die)
    with pytest.raises(Killed):
        train_small(tmp_path)
    monkeypatch.undo()
    assert same_weights(train_small(tmp_path)[0], whole[0])


def test_metrics_say_what_was_run_where_and_what_came_out(tmp_path):
    model, metrics, _ = train_small(tmp_path, settings={"width": 4})
    assert json.loads((tmp_path / "metrics.json").read_text()) == metrics
    assert metrics["settings"] == {"width": 4}
    assert (metrics["seed"], metrics["epochs"], metrics["steps"]) == (0, 3, 18)
    assert metrics["tokens"] == 3 * EXAMPLES * 3
    assert metrics["parameters"] == sum(p.numel() for p in model.parameters()) == 21
    assert metrics["machine"]["cores"] == os.cpu_count()
    assert metrics["versions"]["torch"] == torch.__version__
    assert metrics["command"].startswith("python ")
    assert metrics["seconds"] >= 0
    assert metrics["tokens_per_second"] > 0
    assert [entry["epoch"] for entry in metrics["history"]] == [1, 2, 3]
    assert all(set(entry) == {"epoch", "step", "train_loss", "valid"} for entry in metrics["history"])


def test_the_loss_of_an_epoch_weighs_each_batch_by_its_count(tmp_path):
    _, metrics = train_one_weight(
        tmp_path,
        batches=lambda generator: [(1.0, 1), (4.0, 3)],
        loss=lambda weight, batch: Loss(weight * 0 + batch[0], batch[1], 1),
    )
    assert metrics["history"][0]["train_loss"] == pytest.approx(13 / 4)


def truncate(content, weight):
    return content[: len(content) // 2]


def flip_a_bit_of_a_weight(content, weight):
    place = content.index(weight)
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit_of_a_weight, lambda *_: b"", lambda *_: b"no checkpoint"],
    ids=["truncated", "flipped", "empty", "other"],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_in_a_sentence_and_kept(tmp_path, damage, error_of):
    model, _, _ = train_small(tmp_path)
    path = tmp_path / "checkpoint.pt"
    damaged = damage(path.read_bytes(), model[0].weight.detach().numpy().tobytes())
    path.write_bytes(damaged)
    said = error_of(lambda: exit_code(lambda: train_small(tmp_path)))
    assert said.startswith(f"{path} must be a checkpoint of this program, got a file that is damaged")
    assert path.read_bytes() == damaged


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    for other in ({"weights": torch.ones(3)}, {"settings": 1, "place": 2, "rng": 3}):
        torch.save(other, tmp_path / "checkpoint.pt")
        with pytest.raises(InputError, match="must be a checkpoint of this program"):
            train_small(tmp_path)


def test_other_settings_or_another_model_do_not_resume(tmp_path):
    train_small(tmp_path, settings={"rate": 1})
    with pytest.raises(InputError, match=r"rate must be 1, with which .* was made, got 2"):
        train_small(tmp_path, settings={"rate": 2})
    with pytest.raises(InputError, match="seed must be 0"):
        train_small(tmp_path, seed=1, settings={"rate": 1})
    with pytest.raises(InputError, match="must be of this model"):
        train_small(tmp_path, width=5, settings={"rate": 1})


@pytest.mark.parametrize(
    ("factor", "lr", "said"),
    [
        (math.nan, 0.0, "got nan at step 0"),
        (1.0, math.inf, "the weights must be finite, got others at step 1"),  # after the only loss, which is finite
    ],
)
def test_what_is_not_finite_ends_the_run_and_is_neither_judged_nor_kept(tmp_path, factor, lr, said):
    with pytest.raises(FloatingPointError, match=said):
        train_one_weight(
            tmp_path, batches=lambda generator: [0], loss=lambda weight, batch: Loss(weight * factor, 1, 1), lr=lr
        )
    assert not (tmp_path / "checkpoint.pt").exists()


def test_figures_that_are_not_finite_end_the_run_in_a_sentence(tmp_path, error_of):
    figures = {"valid": math.nan, "right": 1.0, "most": math.inf}
    said = error_of(lambda: exit_code(lambda: train_small(tmp_path, figures=figures)))
    assert said == "the figures must be finite, got valid = nan, most = inf in epoch 1"
    assert not (tmp_path / "metrics.json").exists()
    said = error_of(lambda: exit_code(lambda: training.write_json(tmp_path / "x.json", figures)))
    assert said.startswith(f"{tmp_path}/x.json must have finite numbers, got others")


def test_a_second_run_in_the_folder_at_once_is_refused(tmp_path, whole):
    def second():
        with pytest.raises(InputError, match=f"{tmp_path} must be of one run at a time, got a second one"):
            train_small(tmp_path)
        raise Killed

    with pytest.raises(Killed):
        train_small(tmp_path, kill_at=4, before_kill=second)
    assert same_weights(train_small(tmp_path)[0], whole[0])


def test_a_checkpoint_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("[enforce fail] unexpected pos 64 vs 0\nframes")  # as torch says that a disk is full

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(InputError, match=r"checkpoint.pt must be a file that can be written, got \[enforce .* vs 0$"):
        train_small(tmp_path)


def test_numbers_that_no_run_can_have_are_refused():
    for kind, wrong in [
        (training.seed, ["1e3", "99999999999999999999", "nan"]),
        (training.non_negative, ["nan", "inf", "-1", "x", ""]),
        (training.probability, ["nan", "1", "-0.1", "x"]),
        (training.device, ["meta", "nonsense", "cuda:77"]),
    ]:
        for text in wrong:
            with pytest.raises(argparse.ArgumentTypeError, match="^must be .*got " + text) as refused:
                kind(text)
            assert "\n" not in str(refused.value)
    assert (training.seed("-3"), training.non_negative("2.5"), training.probability("0")) == (-3, 2.5, 0)


def test_why_a_device_cannot_be_used_is_one_line(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("Could not run 'aten::empty'\nCPU: registered at ...")

    monkeypatch.setattr(torch, "zeros", refuse)
    with pytest.raises(argparse.ArgumentTypeError, match=r"got mps: Could not run 'aten::empty'$"):
        training.device("mps")


@pytest.mark.parametrize("output", ["closed", "full"])
def test_an_output_that_takes_nothing_is_no_traceback(output):
    program = "import sys; from examples.training import exit_code; sys.exit(exit_code(lambda: print('x' * 99)))"
    read, write = os.pipe()
    os.close(read)
    with open(write if output == "closed" else "/dev/full", "wb") as file:
        ended = subprocess.run([sys.executable, "-c", program], stdout=file, stderr=subprocess.PIPE, text=True)
    assert "Traceback" not in ended.stderr
    if output == "closed":
        assert (ended.returncode, ended.stderr) == (141, "")
    else:
        assert ended.stderr.startswith("error: [Errno 28]")


@pytest.mark.parametrize(("redirect", "printed"), [("", r"M\xe4nner"), (">&-", "")], ids=["ascii", "no output"])
def test_an_output_without_the_characters_of_the_data_or_none_is_no_error(redirect, printed):
    program = "import sys; from examples.training import exit_code; sys.exit(exit_code(lambda: print('M\\xe4nner')))"
    command = f'exec "$0" -c "$1" {redirect}'
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable, program], capture_output=True, text=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, printed, "")


def test_inverse_sqrt_is_the_schedule_of_the_paper():
    d_model, warmup = 16, 10
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=(d_model * warmup) ** -0.5)
    schedule = inverse_sqrt(optimizer, warmup)
    for step in range(1, 40):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(d_model**-0.5 * min(step**-0.5, step * warmup**-1.5))
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("attention_is_all_you_need", r"(?s)--d-model N +default: 64.*--n-layers N +default: 2"),
        ("bert_classifier", "--checkpoint FOLDER"),
        ("keras_multi_head", "--heads N"),
    ],
)
def test_help(program, printed):
    ended = fresh_python.run_module(f"examples.{program}", "--help", cwd=Path(__file__).parents[2])
    assert re.search(printed, ended.stdout)


def test_an_interrupt_is_no_traceback_and_only_training_is_said_to_resume(tmp_path, capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_code(interrupted) == 130
    assert capsys.readouterr().err == "stopped\n"
    assert exit_code(lambda: train_small(tmp_path, kill_at=4, before_kill=interrupted)) == 130
    assert capsys.readouterr().err == "the same command resumes this run at its last checkpoint\nstopped\n"
