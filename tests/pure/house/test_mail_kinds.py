"""Each kind of mail is of one room: a mailbox tells kinds apart by their names alone."""

import re

from tests.pure.house.package_trees import TEXTS

KIND = re.compile(r'^(\w+_MAIL): Final = MailKind\("(\w+)"\)$', re.MULTILINE)


def test_no_two_kinds_of_mail_have_one_name() -> None:
    found = [kind for text in TEXTS.values() for kind in KIND.findall(text)]
    assert len(found) == sum(len(re.findall(r"MailKind\(", text)) for text in TEXTS.values()), "all are found"
    assert len({name for _, name in found}) == len(found) == len({constant for constant, _ in found})


def test_the_room_that_carries_mail_names_no_kind() -> None:
    assert [name for name, text in TEXTS.items() if name.startswith("transport/") and KIND.search(text)] == []
