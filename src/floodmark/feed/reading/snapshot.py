"""The first part of a stream that begins with a snapshot: every record that lives at one version.

Change logs are trimmed, so a reader that needs every key cannot begin with the first change.  It begins with
the state at a version S, in order of keys, and goes on with the changes above S: none is missing and none
comes twice, because a scan as of S sees every commit at or below S and no other.

    place        (S, "")  (S, key)  …  (S, key)  S        version …
    delivered    nothing  records up to the key  all      changes up to the version

The place is all that a reader stores.  A record that is deleted while the snapshot is read comes in the
snapshot, and its delete behind it.  Expiry is judged at S, as in every scan as of a version: the rows depend
on S and the keys alone, so a reader that resumes in the middle finds the same.
"""

from collections.abc import Iterable, Iterator

from floodmark.codec.ordered import encode_namespace
from floodmark.model.ranges import KeyRange, after, prefix_end
from floodmark.model.stream import ChangeBatch, ChangesRequest, Way
from floodmark.routing import Router


def snapshot_batches(
    router: Router, namespaces: Iterable[int], request: ChangesRequest
) -> Iterator[ChangeBatch]:
    """The records of some namespaces that live at the version `since` of a request, behind its key.

    The caller holds a safe point at that version.  A page without a live record is an empty batch, so that a
    reader can stop.  The last batch is empty, and ends the snapshot.
    """
    assert request.snapshot is not None
    place = request.snapshot
    for namespace in sorted(namespaces):
        prefix = encode_namespace(namespace)
        within = KeyRange(prefix, prefix_end(prefix)).intersect(request.keys)
        left = within and within.intersect(KeyRange(after(place)))
        if left is None:
            continue
        for page in router.scan_records(left, request.since):
            user_keys, versions, partitions, values = (column.to_pylist() for column in page.columns)
            keys = [prefix + key for key in user_keys]
            place = keys[-1] if keys else place
            yield ChangeBatch(
                through=request.since,
                way=Way.SNAPSHOT,
                versions=versions,
                partitions=partitions,
                keys=keys,
                values=values,
                befores=[None] * len(keys) if request.before_images else None,
                snapshot=place,
            )
    yield ChangeBatch(through=request.since, way=Way.SNAPSHOT)
