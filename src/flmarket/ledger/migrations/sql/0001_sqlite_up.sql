-- The tables.
CREATE TABLE ledger_accounts (
    name TEXT NOT NULL,
    balance INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    PRIMARY KEY (name),
    CONSTRAINT ledger_accounts_overdrawn CHECK (balance >= 0 OR name = 'bank')
) STRICT;

CREATE TABLE ledger_entries (
    seq INTEGER NOT NULL,
    time_us INTEGER NOT NULL,
    kind TEXT NOT NULL,
    ref TEXT NOT NULL,
    debit TEXT,
    credit TEXT,
    amount_micros INTEGER NOT NULL,
    owner TEXT,
    round_index INTEGER,
    spent_pico INTEGER,
    limit_pico INTEGER,
    detail TEXT NOT NULL,
    previous TEXT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (seq),
    CONSTRAINT ledger_entries_once UNIQUE (ref, kind),
    CONSTRAINT ledger_entries_double_entry CHECK (CASE WHEN kind IN ('cap', 'release') THEN debit IS NULL AND credit IS NULL AND amount_micros = 0 ELSE debit IS NOT NULL AND credit IS NOT NULL AND debit <> credit AND amount_micros BETWEEN 0 AND 4611686018427387904 END),
    CONSTRAINT ledger_entries_kind CHECK (CASE kind WHEN 'deposit' THEN debit = 'bank' AND credit NOT IN ('escrow', 'fees') WHEN 'withdrawal' THEN debit <> 'escrow' AND credit = 'bank' WHEN 'fee' THEN debit NOT IN ('bank', 'escrow') AND credit = 'fees' WHEN 'hold' THEN debit NOT IN ('bank', 'fees') AND credit = 'escrow' WHEN 'posted' THEN debit = 'escrow' WHEN 'voided' THEN debit = 'escrow' WHEN 'expired' THEN debit = 'escrow' ELSE kind IN ('cap', 'release') END),
    CONSTRAINT ledger_entries_within_cap CHECK (CASE WHEN kind IN ('cap', 'release') THEN (kind = 'release' AND spent_pico IS NULL AND limit_pico IS NULL) OR (spent_pico IS NOT NULL AND limit_pico IS NOT NULL AND spent_pico BETWEEN 0 AND limit_pico) ELSE spent_pico IS NULL AND limit_pico IS NULL END),
    CONSTRAINT ledger_entries_parties CHECK ((owner IS NULL) = (kind IN ('deposit', 'withdrawal', 'fee')) AND (round_index IS NULL) = (kind <> 'hold')),
    CONSTRAINT ledger_entries_hashed CHECK (length(previous) = 64 AND length(hash) = 64)
) STRICT;

CREATE INDEX ledger_entries_owner ON ledger_entries (owner, kind, seq);

CREATE UNIQUE INDEX ledger_entries_resolved_once ON ledger_entries (ref) WHERE kind IN ('posted', 'voided', 'expired');

CREATE TABLE ledger_nodes (
    level INTEGER NOT NULL,
    position INTEGER NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (level, position),
    CONSTRAINT ledger_nodes_hashed CHECK (level > 0 AND position >= 0 AND length(hash) = 64)
) STRICT;

-- Guards of the journal in SQLite. They hold for every writer, whatever program it is.

-- Each entry follows the last one, and names its hash.
CREATE TRIGGER ledger_entries_follow BEFORE INSERT ON ledger_entries
WHEN NEW.seq <> (SELECT coalesce(max(seq), -1) + 1 FROM ledger_entries)
  OR NEW.previous <> coalesce(
    (SELECT hash FROM ledger_entries ORDER BY seq DESC LIMIT 1),
    '0000000000000000000000000000000000000000000000000000000000000000')
BEGIN SELECT RAISE(ABORT, 'ledger: the entry does not follow the last one'); END;

-- Only a held award is resolved, for its price, towards its owner or back to its buyer.
CREATE TRIGGER ledger_entries_resolve BEFORE INSERT ON ledger_entries
WHEN NEW.kind IN ('posted', 'voided', 'expired') AND NOT EXISTS (
  SELECT 1 FROM ledger_entries held
  WHERE held.ref = NEW.ref AND held.kind = 'hold'
    AND held.amount_micros = NEW.amount_micros AND held.owner = NEW.owner
    AND NEW.credit = CASE NEW.kind WHEN 'posted' THEN held.owner ELSE held.debit END)
BEGIN SELECT RAISE(ABORT, 'ledger: no such award is held on these terms'); END;

CREATE TRIGGER ledger_entries_resolve_once BEFORE INSERT ON ledger_entries
WHEN NEW.kind IN ('posted', 'voided', 'expired') AND EXISTS (
  SELECT 1 FROM ledger_entries ended WHERE ended.ref = NEW.ref AND ended.kind IN ('posted', 'voided', 'expired'))
BEGIN SELECT RAISE(ABORT, 'ledger: the award is resolved already'); END;

-- An owner with a registered cap is paid only for a release on record, unless the award is for none (ε = 0).
CREATE TRIGGER ledger_entries_pay_for_release BEFORE INSERT ON ledger_entries
WHEN NEW.kind = 'posted'
  AND EXISTS (
    SELECT 1 FROM ledger_entries held
    WHERE held.ref = NEW.ref AND held.kind = 'hold' AND held.detail <> '{"epsilon":"0.0"}')
  AND EXISTS (SELECT 1 FROM ledger_entries caps WHERE caps.owner = NEW.owner AND caps.kind = 'cap')
  AND NOT EXISTS (SELECT 1 FROM ledger_entries given WHERE given.ref = NEW.ref AND given.kind = 'release')
BEGIN SELECT RAISE(ABORT, 'ledger: the owner has a cap, and no release is on record'); END;

-- A release belongs to an award of its owner that is not paid yet.
CREATE TRIGGER ledger_entries_release BEFORE INSERT ON ledger_entries
WHEN NEW.kind = 'release' AND (
  NOT EXISTS (SELECT 1 FROM ledger_entries held WHERE held.ref = NEW.ref AND held.kind = 'hold' AND held.owner = NEW.owner)
  OR EXISTS (SELECT 1 FROM ledger_entries paid WHERE paid.ref = NEW.ref AND paid.kind = 'posted'))
BEGIN SELECT RAISE(ABORT, 'ledger: the release belongs to no open award of the owner'); END;

-- A release states the owner's cap as registered, and a total that never falls; that it is within is a constraint.
CREATE TRIGGER ledger_entries_cap BEFORE INSERT ON ledger_entries
WHEN NEW.kind = 'release' AND (
  NEW.limit_pico IS NOT (
    SELECT limit_pico FROM ledger_entries WHERE owner = NEW.owner AND kind = 'cap' ORDER BY seq DESC LIMIT 1)
  OR NEW.spent_pico < (
    SELECT spent_pico FROM (
      SELECT * FROM (
        SELECT seq, spent_pico FROM ledger_entries WHERE owner = NEW.owner AND kind = 'cap' ORDER BY seq DESC LIMIT 1)
      UNION ALL
      SELECT * FROM (
        SELECT seq, spent_pico FROM ledger_entries WHERE owner = NEW.owner AND kind = 'release' ORDER BY seq DESC LIMIT 1))
    ORDER BY seq DESC LIMIT 1))
BEGIN SELECT RAISE(ABORT, 'ledger: the release misstates the owner''s cap or total'); END;

-- Every entry moves its money; the balances' own constraint refuses an overdraft.
CREATE TRIGGER ledger_entries_accounts BEFORE INSERT ON ledger_entries WHEN NEW.debit IS NOT NULL
BEGIN
  INSERT INTO ledger_accounts (name, balance, last_seq)
    SELECT NEW.debit, 0, -1 WHERE NOT EXISTS (SELECT 1 FROM ledger_accounts WHERE name = NEW.debit);
  INSERT INTO ledger_accounts (name, balance, last_seq)
    SELECT NEW.credit, 0, -1 WHERE NOT EXISTS (SELECT 1 FROM ledger_accounts WHERE name = NEW.credit);
END;

CREATE TRIGGER ledger_entries_move AFTER INSERT ON ledger_entries WHEN NEW.debit IS NOT NULL
BEGIN
  UPDATE ledger_accounts SET balance = balance - NEW.amount_micros, last_seq = NEW.seq WHERE name = NEW.debit;
  UPDATE ledger_accounts SET balance = balance + NEW.amount_micros, last_seq = NEW.seq WHERE name = NEW.credit;
END;

-- Nothing is ever changed or taken out, not by INSERT OR REPLACE either (which fires no DELETE trigger).
CREATE TRIGGER ledger_entries_once BEFORE INSERT ON ledger_entries
WHEN EXISTS (SELECT 1 FROM ledger_entries known WHERE known.ref = NEW.ref AND known.kind = NEW.kind)
BEGIN SELECT RAISE(ABORT, 'ledger: the entry exists'); END;
CREATE TRIGGER ledger_nodes_once BEFORE INSERT ON ledger_nodes
WHEN EXISTS (SELECT 1 FROM ledger_nodes known WHERE known.level = NEW.level AND known.position = NEW.position)
BEGIN SELECT RAISE(ABORT, 'ledger: the node exists'); END;
CREATE TRIGGER ledger_entries_stay BEFORE UPDATE ON ledger_entries
BEGIN SELECT RAISE(ABORT, 'ledger: entries are only added to'); END;
CREATE TRIGGER ledger_entries_keep BEFORE DELETE ON ledger_entries
BEGIN SELECT RAISE(ABORT, 'ledger: entries are only added to'); END;
CREATE TRIGGER ledger_nodes_stay BEFORE UPDATE ON ledger_nodes
BEGIN SELECT RAISE(ABORT, 'ledger: nodes are only added to'); END;
CREATE TRIGGER ledger_nodes_keep BEFORE DELETE ON ledger_nodes
BEGIN SELECT RAISE(ABORT, 'ledger: nodes are only added to'); END;

-- A balance changes by an entry's amount, once for each entry, and in no other way.
CREATE TRIGGER ledger_accounts_start BEFORE INSERT ON ledger_accounts
WHEN NEW.balance <> 0 OR NEW.last_seq <> -1 OR EXISTS (SELECT 1 FROM ledger_accounts known WHERE known.name = NEW.name)
BEGIN SELECT RAISE(ABORT, 'ledger: an account starts once, at 0'); END;
CREATE TRIGGER ledger_accounts_move BEFORE UPDATE ON ledger_accounts
WHEN NEW.name <> OLD.name OR NOT EXISTS (
  SELECT 1 FROM ledger_entries e
  WHERE e.seq = NEW.last_seq AND NEW.last_seq > OLD.last_seq
    AND ((e.debit = OLD.name AND NEW.balance = OLD.balance - e.amount_micros)
      OR (e.credit = OLD.name AND NEW.balance = OLD.balance + e.amount_micros)))
BEGIN SELECT RAISE(ABORT, 'ledger: a balance moves by entries only'); END;
CREATE TRIGGER ledger_accounts_keep BEFORE DELETE ON ledger_accounts
BEGIN SELECT RAISE(ABORT, 'ledger: accounts are kept'); END;
