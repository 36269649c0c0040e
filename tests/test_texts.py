"""Text from a root is read and does no more: in the log, in errors, and as tables of text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import cnr_jax as cnr
from cnr_jax.texts import logger, visible_lines

EVIL = "x\x1b[31m\r\nCRITICAL root: all is lost\u202e\u2028\x9b2J"
SHOWN = r"x\x1b[31m\r\nCRITICAL root: all is lost\u202e\u2028\x9b2J"


def acts(text: str) -> list[str]:
    """What of a text a terminal or a reader of lines would act on."""
    return [c for c in text.replace("\n  ", "") if not c.isprintable()]


def test_text_from_a_root_leaves_visible(
    tiny_run: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, run = tmp_path / EVIL, tiny_run()
    with run.open(root) as manager:
        run.run(manager, range(4))
    (root / f"3.abandoned-{EVIL}").mkdir()
    (root / f"{EVIL} 7" / "default").mkdir(parents=True)
    (root / f"{EVIL} 7" / "default" / "manifest.json").write_text("{}")
    next((root / "3" / "default" / "rows.p00000").rglob("c/0")).unlink()
    caplog.set_level(logging.DEBUG, "cnr_jax")
    with run.open(root) as manager:
        run.restore(manager, 1)  # a rollback: steps make way
        run.run(manager, [2])
    with pytest.raises(cnr.errors.CnrError) as caught:
        cnr.read_rows(root, "user", [0], step=3)
    told = [str(caught.value), str(cnr.describe(root)), *map(str, cnr.verify(root))]
    told.append(str(cnr.prune(root, keep=1)))
    assert sum(SHOWN in text for text in told) >= 4
    assert not [text for text in told if acts(text.replace("\n", "\n  "))]
    records = [each for each in caplog.records if each.name.startswith("cnr_jax")]
    texts = [logging.Formatter().format(each) for each in records]
    assert sum(SHOWN in text for text in texts) >= 3
    assert not [each.getMessage() for each in records if acts(each.getMessage())]
    assert not [text for text in texts if acts(text.replace("\n", "\n  "))]


def test_a_message_stays_a_template_of_what_it_is_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logger("cnr_jax.tests")
    text = "%s of %r took %.1f s, %d times"
    log.warning(text, EVIL, EVIL, 2.0, 3)
    log.warning("%(name)s", {"name": EVIL})
    log.warning("100 % sure")
    log.warning("%s: %s", "user\n  item", cnr.errors.OptionError("no\n  hint: a"))
    try:
        raise ValueError(EVIL)
    except ValueError:
        log.exception("it failed")
    first, second, third, lines, last = caplog.records
    assert first.msg == text
    assert first.getMessage() == f"{SHOWN} of {EVIL!r} took 2.0 s, 3 times"
    assert second.getMessage() == SHOWN and third.getMessage() == "100 % sure"
    assert lines.getMessage() == "user\\n  item: no\n  hint: a"
    shown = logging.Formatter().format(last)
    assert r"ValueError: x\x1b[31m\r" in shown and "\x1b" not in shown


def test_lines_of_an_error_stay_lines() -> None:
    error = cnr.errors.OptionError(f"no {EVIL}\n  got {EVIL}\n  hint: another")
    assert str(error) == f"no {SHOWN}\n  got {SHOWN}\n  hint: another"
    assert visible_lines(str(error)) == str(error)


def test_every_module_logs_through_it() -> None:
    package = Path(cnr.__file__).parent
    calls = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "logging.getLogger(__name__)" in path.read_text("utf-8")
    }
    assert calls == set()
