"""Tasks on Flower: the worker starts a run on a SuperLink and watches it; the run plays rounds on the broker's books.

    worker (in the service)                    run (a ServerApp that the SuperLink starts)
    `runs`: start, watch, start again, end     `server`: rounds on the broker's own tables and ledger
                       └──────── `tenancy`, a row in the database ────────┘

Neither needs the other to be alive: the row says who is at work and since when, the run's folder and the ledger say how
far it has come. What would break it: a run that does not see the same database and the same folder as the service.
"""
