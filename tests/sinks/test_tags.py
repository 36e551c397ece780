"""Names in trackers: stable, taken by the tracker, and never two sites under one."""

import pytest

from aggregator.sinks.tags import ANY_PRINTABLE, WORDS_AND_PUNCTUATION, TagBook
from aggregator.testing import make_site
from telemetry.errors import SinkTagError

PLAIN = make_site("layers.0.attn:q_proj", "gradient")
AT, HASH = make_site("a@b"), make_site("a#b")


def book(alphabet=WORDS_AND_PUNCTUATION):
    return TagBook(alphabet)


def test_a_name_that_the_tracker_takes_stays_and_nothing_is_disclosed():
    tags = book()
    assert tags.name(PLAIN) == "gradient/layers.0.attn:q_proj"
    assert tags.disclosures == ()


def test_foreign_characters_become_underscores_with_the_id_of_the_site_behind():
    tags = book()
    assert tags.name(AT) == f"activation/a_b-{f'{AT.site_id:016x}'[:8]}"
    assert tags.name(AT) != tags.name(HASH)
    (told,) = tags.disclosures
    assert told.startswith("2 names were changed: activation/a@b → activation/a_b-")


def test_a_changed_name_depends_on_nothing_but_the_site():
    alone, after_others = book(), book()
    for i in range(10):
        after_others.name(make_site(f"x{i}?"))
    assert alone.name(AT) == after_others.name(AT)


@pytest.mark.parametrize("name", ["a//b", "/a", "a/", "a/../b", "./a", ".", ""])
def test_segments_that_a_path_would_swallow_are_replaced(name):
    given = book().name(make_site(name))
    assert given is not None
    assert not {"", ".", ".."} & set(given.split("/"))
    assert book(ANY_PRINTABLE).name(make_site(name)) == f"activation/{name}"


def test_a_long_name_is_cut_so_that_the_whole_tag_fits_and_stays_its_own():
    names = [book().name(make_site(f"{'deep.' * 80}{end}")) for end in ("q", "k")]
    assert len(set(names)) == 2
    assert all(len(f"{name}/finite_fraction") <= 250 for name in names)


def test_two_sites_of_one_name_are_refused_at_attach_with_both_named():
    first, second = make_site("b/c", "a"), make_site("c", "a/b")
    with pytest.raises(SinkTagError, match=r"'mlflow' would show a/b 'c' and a 'b/c' as one"):
        book().admit([first, PLAIN, second], "mlflow")


def test_a_late_site_whose_name_is_taken_is_left_out_and_disclosed():
    tags = book()
    tags.admit([make_site("b/c", "a")], "mlflow")
    assert tags.name(make_site("c", "a/b")) is None
    assert tags.name(make_site("b/c", "a")) == "a/b/c"
    assert tags.disclosures == ("1 sites were left out, another has the name: a/b 'c'",)
