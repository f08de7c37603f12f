"""`python -m dnn_bench synthetic`: what dist.sh starts in every rank."""

import re
from pathlib import Path

import pytest

from dnn_bench import synthetic
from tests.support.commands import run_module

pytestmark = pytest.mark.dist


def test_it_trains_on_text(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("to be or not to be " * 200)
    argv = ["--model", "gpt2_tiny", "--batch-size", "2", "--baseline", "auto", "--data-dir", str(tmp_path)]
    argv += ["--num-iters", "2", "--num-warmup-batches", "0"]
    result = run_module("dnn_bench", "synthetic", *argv)
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"Iter #\d: \d+\.\d sentence/sec per CPU", result.stdout)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet99"], "unknown model 'resnet99'; choose one of: .*resnet50"),
        (["--baseline", "magic"], "unknown baseline 'magic'"),
        (["--model", "mlp_tiny", "--batch-size", "1000000000"], "a batch of about \\d+ would fit"),
        (["--model", "gpt2_tiny", "--data-dir", "/no/such/folder"], "/no/such/folder"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert synthetic.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1
    assert re.search(message, shown.err), shown.err
