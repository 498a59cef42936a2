"""A secondary index beside its table: the row and its entries are one atomic batch.

`users` has the city of each user, and `by_city` is its index, with a key `<city>/<user>` for each user.  An
atomic read of both never finds a user without her entry, or an entry of a city that she has left, even while
a writer keeps moving her.
"""

from tempfile import TemporaryDirectory
from threading import Thread

import floodmark

CITIES = (b"oslo", b"rome", b"bonn")
MOVES = 300


class Residents:
    """Users by name, and by city.  Each user has one writer at a time."""

    def __init__(self, site: floodmark.Site) -> None:
        self._site = site
        self._users = site.create_namespace("users")
        self._by_city = site.create_namespace("by_city")

    def move(self, user: bytes, city: bytes) -> None:
        """Move a user to a city, and delete the index entry of the city that she leaves."""
        left = self._users.get(user)
        with self._site.atomic() as batch:
            batch.put(self._users, user, city)
            if left is not None and left != city:
                batch.delete(self._by_city, left + b"/" + user)
            batch.put(self._by_city, city + b"/" + user, b"")

    def in_city(self, city: bytes) -> list[bytes]:
        """The users of a city, read from the index."""
        return [key.removeprefix(city + b"/") for key, _ in self._by_city.scan(prefix=city + b"/")]

    def is_right(self, user: bytes) -> bool:
        """Whether the index has an entry for the city of a user, and for no other city."""
        entries = [(self._by_city, city + b"/" + user) for city in CITIES]
        city, *found = self._site.read_atomic([(self._users, user), *entries])
        return [entry is not None for entry in found] == [each == city for each in CITIES]


with TemporaryDirectory() as directory, floodmark.open(directory, site="oslo") as site:
    residents = Residents(site)
    # Put the entries of Oslo and Rome into another partition than the table.
    site.split("by_city", b"n")
    for user, city in ((b"ada", b"oslo"), (b"alan", b"rome"), (b"grace", b"oslo")):
        residents.move(user, city)
    print(residents.in_city(b"oslo"), residents.in_city(b"rome"))

    def travel() -> None:
        for number in range(MOVES):
            residents.move(b"ada", CITIES[number % len(CITIES)])

    traveller = Thread(target=travel)
    traveller.start()
    wrong = 0
    while traveller.is_alive():
        wrong += not residents.is_right(b"ada")
    traveller.join()
    print("reads that found the index wrong:", wrong)
    print(residents.in_city(b"oslo"), residents.in_city(b"bonn"))
