"""What the broker can do, free of HTTP: functions of a `Broker`, a `Party` and a request, that return frozen views."""
