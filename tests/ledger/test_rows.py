"""The quick way to hash an entry writes the very bytes that are defined: canonical JSON of its content."""

import hashlib
import json

from hypothesis import given
from hypothesis import strategies as st

from flmarket.ledger.entry import Entry, EntryKind, Line, canonical, release_detail, row_hash, row_of, sealed
from flmarket.privacy import (
    ApproxDp,
    ExponentialRelease,
    GaussianRelease,
    PureDp,
    RecordLevel,
    Unprotected,
    ZCdp,
    event_to_dict,
)

texts = st.text(st.characters(exclude_categories=()), max_size=12)  # also what no text should hold
numbers = st.integers(-(2**70), 2**70)
maybe = st.none() | texts
counts = [st.none() | numbers for _ in range(3)]
lines = st.builds(Line, st.sampled_from(EntryKind), texts, maybe, maybe, numbers, maybe, *counts, texts)
positive = st.floats(1e-9, 1e18)
updates = [st.builds(one, positive) for one in (PureDp, ZCdp, GaussianRelease, ExponentialRelease)]
approx = st.builds(ApproxDp, positive, st.floats(1e-30, 0.5))
events = st.one_of(
    *updates, approx, st.just(Unprotected()), st.builds(RecordLevel, approx | st.one_of(updates[:3])),
    st.sampled_from([PureDp(0.0), PureDp(-0.0), ZCdp(1e18)]),
)  # fmt: skip


@given(texts, events)
def test_releases_are_written_as_canonical_json(mechanism, event):
    said = canonical({"mechanism": mechanism, "guarantee": event_to_dict(event)})
    assert release_detail(mechanism, event) == said


@given(lines, numbers, numbers, texts)
def test_rows_hash_as_canonical_json(line, seq, time_us, previous):
    entry = sealed(line, seq, time_us, previous)
    content = line._asdict() | {"kind": line.kind.value}
    content |= {"seq": seq, "time_us": time_us, "previous": previous}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert entry.hash == hashlib.sha256(b"\x00" + text.encode()).hexdigest() == row_hash(entry.row()).hex()
    assert entry.to_dict() == content | {"hash": entry.hash}
    assert Entry.from_row(entry.row()) == entry == Entry.from_dict(entry.to_dict())
    assert row_of(line, seq, time_us, previous, entry.hash) == entry.row()
