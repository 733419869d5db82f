-- Dropping a table drops its triggers.
SELECT 1;
