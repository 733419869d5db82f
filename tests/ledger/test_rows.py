"""The quick way to hash an entry writes the very bytes that are defined: canonical JSON of its content."""

import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from flmarket.ledger.entry import Entry, EntryKind, Line, row_hash, row_of, sealed

texts = st.text(st.characters(exclude_categories=()), max_size=12)  # also what no text should hold
numbers = st.integers(-(2**70), 2**70)
maybe = st.none() | texts
counts = [st.none() | numbers for _ in range(3)]
lines = st.builds(Line, st.sampled_from(EntryKind), texts, maybe, maybe, numbers, maybe, *counts, texts)


@given(lines, numbers, numbers, texts)
def test_rows_hash_as_canonical_json(line, seq, time_us, previous):
    entry = sealed(line, seq, time_us, previous)
    content = {name: getattr(line, name) for name in Line.__slots__} | {"kind": line.kind.value}
    content |= {"seq": seq, "time_us": time_us, "previous": previous}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert entry.hash == hashlib.sha256(b"\x00" + text.encode()).hexdigest() == row_hash(entry.row()).hex()
    assert entry.content() == content
    assert Entry.from_row(entry.row()) == entry == Entry.from_dict(entry.to_dict())
    assert row_of(line, seq, time_us, previous, entry.hash) == entry.row()
