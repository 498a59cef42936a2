"""A first look at Floodmark: write, read, read the past, and see every change."""

from tempfile import TemporaryDirectory

import floodmark

with TemporaryDirectory() as directory, floodmark.open(directory, site="oslo") as site:
    users = site.create_namespace("users")

    first = users.put(b"ada", b"countess")  # on disk when it returns
    users.put(b"ada", b"programmer")
    print(users.get(b"ada"), users.get(b"ada", at=first))  # now, and as of a version

    users.put_many({b"alan": b"logician", b"grace": b"admiral"})  # one commit: both or neither
    users.delete(b"alan")
    print(dict(users.scan(prefix=b"a")))

    took_over = users.compare_and_set(b"grace", b"admiral", b"rear admiral")
    print(took_over, users.compare_and_set(b"grace", b"admiral", b"captain"))

    for change in site.changes("users", since=first):  # in commit order, deletes too
        print(change.type, change.key, change.value)
