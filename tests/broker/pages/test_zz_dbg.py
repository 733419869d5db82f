import httpx, json
from flmarket.broker.app import create_app
from flmarket.broker.office import tasks
import sys, pathlib; sys.path.insert(0, str(pathlib.Path(__file__).parent)); from test_pages import ORDER
from test_pages import csrf_of
def test_x(small, joined, play, serve):
    buyer = joined(small, "buyer")
    with serve(create_app(broker=small)) as address, httpx.Client(base_url=address, timeout=60) as client:
        assert client.post("/sign-in", data={"key": buyer.key}).status_code == 303
        token = csrf_of(client)
        for b in ("20","40","100"):
          for s in "012":
            a = client.post("/tasks/new", data=ORDER | {"kind":"auction","rounds":"2","budget":b,"seed":s,"csrf_token": token})
            t = a.headers["location"].split("/")[2]
            play(small)
            got = tasks.get_task(small, buyer.party, t)
            if b=="20" and s=="0": print(json.dumps(got.request))
            print(b, s, [(r.bids, r.winners, r.spent_micros) for r in tasks.rounds(small, buyer.party, t).items])
