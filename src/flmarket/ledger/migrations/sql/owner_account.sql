-- An owner's privacy account (`flmarket.ledger.owner_account`), version 1.
CREATE TABLE caps (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    time_us INTEGER NOT NULL,
    cap TEXT NOT NULL
) STRICT;
CREATE TABLE releases (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    time_us INTEGER NOT NULL,
    award_id TEXT NOT NULL UNIQUE,
    buyer TEXT NOT NULL,
    guarantee TEXT NOT NULL
) STRICT;
CREATE TRIGGER caps_stay BEFORE UPDATE ON caps BEGIN SELECT RAISE(ABORT, 'caps are only added to'); END;
CREATE TRIGGER caps_keep BEFORE DELETE ON caps BEGIN SELECT RAISE(ABORT, 'caps are only added to'); END;
CREATE TRIGGER releases_stay BEFORE UPDATE ON releases BEGIN SELECT RAISE(ABORT, 'releases are only added to'); END;
CREATE TRIGGER releases_keep BEFORE DELETE ON releases BEGIN SELECT RAISE(ABORT, 'releases are only added to'); END;
