"""Bars of long work: units, and which are shown at once."""

from headroom._core.progress import progress_bar


def test_bytes_have_prefixes_and_wait_a_second(capsys):
    with progress_bar(3_000_000, "saving", unit="B", shown=True) as bar:
        bar.update(2_000_000)
        assert (bar.total, bar.unit, bar.unit_scale, bar.delay) == (3_000_000, "B", True, 1)
    assert "saving" not in capsys.readouterr().err
    assert "2.00M/3.00M" in bar.format_meter(**bar.format_dict)


def test_others_are_shown_at_once(capsys):
    with progress_bar(3, "planning", unit="step", shown=True) as bar:
        assert bar.delay == 0 and not bar.unit_scale
        assert "planning:   0%" in capsys.readouterr().err
        bar.update(1)
        assert "1/3 [" in str(bar) and "step" in str(bar)
    with progress_bar(3, None, unit="step", shown=False) as bar:
        bar.update(3)
    assert "3/3" not in capsys.readouterr().err
