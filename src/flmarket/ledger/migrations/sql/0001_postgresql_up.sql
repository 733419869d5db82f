-- The tables.
CREATE TABLE ledger_accounts (
    name TEXT NOT NULL,
    balance BIGINT NOT NULL,
    last_seq BIGINT NOT NULL,
    PRIMARY KEY (name),
    CONSTRAINT ledger_accounts_overdrawn CHECK (balance >= 0 OR name = 'bank')
);

CREATE TABLE ledger_entries (
    seq BIGINT NOT NULL,
    time_us BIGINT NOT NULL,
    kind TEXT NOT NULL,
    ref TEXT NOT NULL,
    debit TEXT,
    credit TEXT,
    amount_micros BIGINT NOT NULL,
    owner TEXT,
    round_index BIGINT,
    spent_pico BIGINT,
    limit_pico BIGINT,
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
);

CREATE INDEX ledger_entries_owner ON ledger_entries (owner, kind, seq);

CREATE UNIQUE INDEX ledger_entries_resolved_once ON ledger_entries (ref) WHERE kind IN ('posted', 'voided', 'expired');

CREATE TABLE ledger_nodes (
    level INTEGER NOT NULL,
    position BIGINT NOT NULL,
    hash TEXT NOT NULL,
    PRIMARY KEY (level, position),
    CONSTRAINT ledger_nodes_hashed CHECK (level > 0 AND position >= 0 AND length(hash) = 64)
);

-- Guards of the journal in PostgreSQL: the same rules as for SQLite, as functions.
-- They look up single rows; plans made while the table was still empty would scan all of it (hence enable_seqscan).

CREATE FUNCTION ledger_entry_check() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $$
DECLARE
  last_entry ledger_entries%ROWTYPE;
  held ledger_entries%ROWTYPE;
  cap_seq bigint;
  cap_limit bigint;
  cap_spent bigint;
  given_seq bigint;
  given_spent bigint;
BEGIN
  -- Each entry follows the last one, and names its hash.
  SELECT * INTO last_entry FROM ledger_entries ORDER BY seq DESC LIMIT 1;
  IF NEW.seq <> coalesce(last_entry.seq, -1) + 1 OR NEW.previous <> coalesce(last_entry.hash, repeat('0', 64)) THEN
    RAISE EXCEPTION 'ledger: the entry does not follow the last one' USING ERRCODE = 'integrity_constraint_violation';
  END IF;

  IF NEW.kind IN ('posted', 'voided', 'expired', 'release') THEN
    SELECT * INTO held FROM ledger_entries WHERE ref = NEW.ref AND kind = 'hold';
  END IF;

  -- Only a held award is resolved, for its price, towards its owner or back to its buyer; and once.
  IF NEW.kind IN ('posted', 'voided', 'expired') THEN
    IF (held.amount_micros = NEW.amount_micros AND held.owner = NEW.owner
        AND NEW.credit = CASE NEW.kind WHEN 'posted' THEN held.owner ELSE held.debit END) IS NOT TRUE THEN
      RAISE EXCEPTION 'ledger: no such award is held on these terms' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    IF EXISTS (SELECT 1 FROM ledger_entries WHERE ref = NEW.ref AND kind IN ('posted', 'voided', 'expired')) THEN
      RAISE EXCEPTION 'ledger: the award is resolved already' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
  END IF;

  IF NEW.kind IN ('posted', 'release') THEN
    SELECT seq, limit_pico, spent_pico INTO cap_seq, cap_limit, cap_spent
      FROM ledger_entries WHERE owner = NEW.owner AND kind = 'cap' ORDER BY seq DESC LIMIT 1;
  END IF;

  -- An owner with a registered cap is paid only for a release on record, unless the award is for none (ε = 0).
  IF NEW.kind = 'posted' AND cap_seq IS NOT NULL AND held.detail <> '{"epsilon":"0.0"}'
      AND NOT EXISTS (SELECT 1 FROM ledger_entries WHERE ref = NEW.ref AND kind = 'release') THEN
    RAISE EXCEPTION 'ledger: the owner has a cap, and no release is on record'
      USING ERRCODE = 'integrity_constraint_violation';
  END IF;

  IF NEW.kind = 'release' THEN
    -- A release belongs to an award of its owner that is not paid yet.
    IF (held.owner = NEW.owner) IS NOT TRUE
        OR EXISTS (SELECT 1 FROM ledger_entries WHERE ref = NEW.ref AND kind = 'posted') THEN
      RAISE EXCEPTION 'ledger: the release belongs to no open award of the owner'
        USING ERRCODE = 'integrity_constraint_violation';
    END IF;
    -- It states the owner's cap as registered, and a total that never falls; that it is within is a constraint.
    SELECT seq, spent_pico INTO given_seq, given_spent
      FROM ledger_entries WHERE owner = NEW.owner AND kind = 'release' ORDER BY seq DESC LIMIT 1;
    IF given_seq > cap_seq THEN
      cap_spent := given_spent;
    END IF;
    IF NEW.limit_pico IS DISTINCT FROM cap_limit OR NEW.spent_pico < cap_spent THEN
      RAISE EXCEPTION 'ledger: the release misstates the owner''s cap or total'
        USING ERRCODE = 'integrity_constraint_violation';
    END IF;
  END IF;

  RETURN NEW;
END $$;

-- Every entry moves its money; the balances' own constraint refuses an overdraft. Once for all entries of a statement:
-- a row that is updated a thousand times in one transaction gets slower each time.
CREATE FUNCTION ledger_entry_move() RETURNS trigger LANGUAGE plpgsql
SET enable_seqscan = off AS $$
BEGIN
  INSERT INTO ledger_accounts (name, balance, last_seq)
    SELECT debit, 0, -1 FROM added WHERE debit IS NOT NULL
    UNION SELECT credit, 0, -1 FROM added WHERE credit IS NOT NULL
    ON CONFLICT (name) DO NOTHING;
  UPDATE ledger_accounts SET balance = balance + moved.amount, last_seq = moved.seq
    FROM (
      SELECT name, sum(amount) AS amount, max(seq) AS seq FROM (
        SELECT debit AS name, -amount_micros AS amount, seq FROM added
        UNION ALL SELECT credit, amount_micros, seq FROM added) sides
      GROUP BY name) moved
    WHERE ledger_accounts.name = moved.name;
  RETURN NULL;
END $$;

CREATE FUNCTION ledger_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION 'ledger: % is only added to', TG_TABLE_NAME USING ERRCODE = 'integrity_constraint_violation';
END $$;

-- A balance changes by entries, that is from within their trigger, and in no other way.
CREATE FUNCTION ledger_account_check() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  IF TG_OP = 'INSERT' THEN
    IF NEW.balance <> 0 OR NEW.last_seq <> -1 THEN
      RAISE EXCEPTION 'ledger: an account starts once, at 0' USING ERRCODE = 'integrity_constraint_violation';
    END IF;
  ELSIF pg_trigger_depth() < 2 OR NEW.name <> OLD.name OR NEW.last_seq <= OLD.last_seq THEN
    RAISE EXCEPTION 'ledger: a balance moves by entries only' USING ERRCODE = 'integrity_constraint_violation';
  END IF;
  RETURN NEW;
END $$;

CREATE TRIGGER ledger_entries_check BEFORE INSERT ON ledger_entries FOR EACH ROW EXECUTE FUNCTION ledger_entry_check();
CREATE TRIGGER ledger_entries_move AFTER INSERT ON ledger_entries REFERENCING NEW TABLE AS added
  FOR EACH STATEMENT EXECUTE FUNCTION ledger_entry_move();
CREATE TRIGGER ledger_entries_keep BEFORE UPDATE OR DELETE ON ledger_entries
  FOR EACH ROW EXECUTE FUNCTION ledger_keep();
CREATE TRIGGER ledger_entries_keep_all BEFORE TRUNCATE ON ledger_entries EXECUTE FUNCTION ledger_keep();
CREATE TRIGGER ledger_nodes_keep BEFORE UPDATE OR DELETE ON ledger_nodes FOR EACH ROW EXECUTE FUNCTION ledger_keep();
CREATE TRIGGER ledger_nodes_keep_all BEFORE TRUNCATE ON ledger_nodes EXECUTE FUNCTION ledger_keep();
CREATE TRIGGER ledger_accounts_check BEFORE INSERT OR UPDATE ON ledger_accounts
  FOR EACH ROW EXECUTE FUNCTION ledger_account_check();
CREATE TRIGGER ledger_accounts_keep BEFORE DELETE ON ledger_accounts FOR EACH ROW EXECUTE FUNCTION ledger_keep();
CREATE TRIGGER ledger_accounts_keep_all BEFORE TRUNCATE ON ledger_accounts EXECUTE FUNCTION ledger_keep();
