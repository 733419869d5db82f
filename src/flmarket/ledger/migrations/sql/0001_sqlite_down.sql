-- Dropping a table drops its triggers.
DROP TABLE ledger_nodes;
DROP TABLE ledger_entries;
DROP TABLE ledger_accounts;
