-- The guards of version 0001, said so that SQLite checks them in half the time: a list of three kinds is a table that it
-- builds anew for every row, so kinds are compared one by one, and all that an award has so far is read in one search.
DROP INDEX ledger_entries_resolved_once;
CREATE UNIQUE INDEX ledger_entries_resolved_once ON ledger_entries (ref) WHERE kind = 'posted' OR kind = 'voided' OR kind = 'expired';

DROP TRIGGER ledger_entries_follow;
DROP TRIGGER ledger_entries_resolve;
DROP TRIGGER ledger_entries_resolve_once;
DROP TRIGGER ledger_entries_pay_for_release;
DROP TRIGGER ledger_entries_release;
DROP TRIGGER ledger_entries_cap;
DROP TRIGGER ledger_entries_accounts;
DROP TRIGGER ledger_entries_once;

-- Each entry follows the last one, and names its hash.
CREATE TRIGGER ledger_entries_follow BEFORE INSERT ON ledger_entries
WHEN CASE (SELECT max(seq) FROM ledger_entries)
  WHEN NEW.seq - 1 THEN NEW.previous <> (SELECT hash FROM ledger_entries WHERE seq = NEW.seq - 1)
  ELSE NEW.seq <> 0 OR EXISTS (SELECT 1 FROM ledger_entries)
    OR NEW.previous <> '0000000000000000000000000000000000000000000000000000000000000000'
  END
BEGIN SELECT RAISE(ABORT, 'ledger: the entry does not follow the last one'); END;

-- Only a held award is resolved, for its price, towards its owner or back to its buyer, and once. An owner with a
-- registered cap is paid only for a release on record, unless the award is for none (ε = 0).
-- The sum: 1 held on these terms, 3 if it is for no loss, 2 more for a release, below 0 on other terms or resolved.
CREATE TRIGGER ledger_entries_resolve BEFORE INSERT ON ledger_entries
WHEN (NEW.kind = 'posted' OR NEW.kind = 'voided' OR NEW.kind = 'expired') AND CASE (
  SELECT sum(CASE known.kind
    WHEN 'hold' THEN CASE
      WHEN known.amount_micros = NEW.amount_micros AND known.owner = NEW.owner
        AND NEW.credit = CASE NEW.kind WHEN 'posted' THEN known.owner ELSE known.debit END
      THEN CASE known.detail WHEN '{"epsilon":"0.0"}' THEN 3 ELSE 1 END
      ELSE -9 END
    WHEN 'release' THEN 2
    WHEN 'posted' THEN -9
    WHEN 'voided' THEN -9
    WHEN 'expired' THEN -9
    ELSE 0 END)
  FROM ledger_entries known WHERE known.ref = NEW.ref)
  WHEN 1 THEN NEW.kind = 'posted' AND EXISTS (
    SELECT 1 FROM ledger_entries caps WHERE caps.owner = NEW.owner AND caps.kind = 'cap')
  WHEN 3 THEN 0
  WHEN 5 THEN 0
  ELSE 1 END
BEGIN
  SELECT CASE
    WHEN EXISTS (SELECT 1 FROM ledger_entries ended WHERE ended.ref = NEW.ref AND ended.kind IN ('posted', 'voided', 'expired'))
    THEN RAISE(ABORT, 'ledger: the award is resolved already')
    WHEN EXISTS (
      SELECT 1 FROM ledger_entries held
      WHERE held.ref = NEW.ref AND held.kind = 'hold'
        AND held.amount_micros = NEW.amount_micros AND held.owner = NEW.owner
        AND NEW.credit = CASE NEW.kind WHEN 'posted' THEN held.owner ELSE held.debit END)
    THEN RAISE(ABORT, 'ledger: the owner has a cap, and no release is on record')
    ELSE RAISE(ABORT, 'ledger: no such award is held on these terms') END;
END;

-- A release belongs to an award of its owner that is not paid yet, and there is one.
CREATE TRIGGER ledger_entries_release BEFORE INSERT ON ledger_entries
WHEN NEW.kind = 'release' AND (
  SELECT sum(CASE known.kind WHEN 'hold' THEN known.owner = NEW.owner WHEN 'posted' THEN -9 WHEN 'release' THEN -9 ELSE 0 END)
  FROM ledger_entries known WHERE known.ref = NEW.ref) IS NOT 1
BEGIN SELECT RAISE(ABORT, 'ledger: the release belongs to no open award of the owner'); END;

-- A release states the owner's cap as registered, and a total that never falls; that it is within is a constraint.
CREATE TRIGGER ledger_entries_cap BEFORE INSERT ON ledger_entries
WHEN NEW.kind = 'release' AND (
  NEW.limit_pico IS NOT (
    SELECT limit_pico FROM ledger_entries WHERE owner = NEW.owner AND kind = 'cap' ORDER BY seq DESC LIMIT 1)
  OR (NEW.spent_pico IS NOT NULL AND NEW.spent_pico < (
    SELECT spent_pico FROM ledger_entries WHERE seq = max(
      ifnull((SELECT max(seq) FROM ledger_entries WHERE owner = NEW.owner AND kind = 'cap'), -1),
      ifnull((SELECT max(seq) FROM ledger_entries WHERE owner = NEW.owner AND kind = 'release'), -1)))))
BEGIN SELECT RAISE(ABORT, 'ledger: the release misstates the owner''s cap or total'); END;

-- Every entry moves its money (ledger_entries_move), also where an account is new.
CREATE TRIGGER ledger_entries_accounts BEFORE INSERT ON ledger_entries
WHEN NEW.debit IS NOT NULL AND NOT (
  EXISTS (SELECT 1 FROM ledger_accounts WHERE name = NEW.debit)
  AND EXISTS (SELECT 1 FROM ledger_accounts WHERE name = NEW.credit))
BEGIN
  INSERT INTO ledger_accounts (name, balance, last_seq)
    SELECT NEW.debit, 0, -1 WHERE NOT EXISTS (SELECT 1 FROM ledger_accounts WHERE name = NEW.debit);
  INSERT INTO ledger_accounts (name, balance, last_seq)
    SELECT NEW.credit, 0, -1 WHERE NOT EXISTS (SELECT 1 FROM ledger_accounts WHERE name = NEW.credit);
END;

-- Nothing is replaced (INSERT OR REPLACE fires no DELETE trigger); releases and resolutions are guarded above.
CREATE TRIGGER ledger_entries_once BEFORE INSERT ON ledger_entries
WHEN CASE NEW.kind WHEN 'release' THEN 0 WHEN 'posted' THEN 0 WHEN 'voided' THEN 0 WHEN 'expired' THEN 0
  ELSE EXISTS (SELECT 1 FROM ledger_entries known WHERE known.ref = NEW.ref AND known.kind = NEW.kind) END
BEGIN SELECT RAISE(ABORT, 'ledger: the entry exists'); END;
