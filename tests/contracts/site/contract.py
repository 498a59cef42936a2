"""The contract of a site, as tests.  Derive a class from `SiteContract` and say how a site is opened.

    class TestMySite(SiteContract):
        def open_site(self, time, directory):
            return open_my_site(directory, site=SITE, site_id=SITE_ID, time_source=time)

Each test gets a fresh site whose time stands still until the test moves it, so `time` must be the only
clock: of the site, and, where the site is behind a server, of the client that reckons with the server's.
What only happens in real time (a server that notices that a reader has gone) is waited for.

`open_on(engine, time)` opens a site on an engine that fails when it is told to; a class that cannot choose
its engine leaves it out, and skips the few tests that need it.

Where something is to be "the same", it is compared with a site of this process that holds everything in
memory: results, the classes, messages and details of errors, and the versions of long histories.

The parts stand in files of their own, and may be run alone: namespaces, writes, atomic batches, the writer,
scans, changes, snapshots, subscriptions, transactions, their reads, watches, feeds, streams from outside,
merging, verifying, administration, refusals, closing, histories.
"""

from tests.contracts.site.administration import AdministrationContract
from tests.contracts.site.atomic import AtomicContract
from tests.contracts.site.changes import ChangeContract
from tests.contracts.site.closing import ClosingContract
from tests.contracts.site.feeds import FeedContract
from tests.contracts.site.histories import HistoryContract
from tests.contracts.site.merged_copies import MergedCopiesContract
from tests.contracts.site.merging import MergingContract
from tests.contracts.site.namespaces import NamespaceContract
from tests.contracts.site.refusals import RefusalContract
from tests.contracts.site.scans import ScanContract
from tests.contracts.site.serializing import SerializingContract
from tests.contracts.site.snapshots import SnapshotContract
from tests.contracts.site.streams import StreamContract
from tests.contracts.site.subscriptions import SubscriptionContract
from tests.contracts.site.transactions import TransactionContract
from tests.contracts.site.verifying import VerifyingContract
from tests.contracts.site.watching import WatchingContract
from tests.contracts.site.writer import WriterContract
from tests.contracts.site.writes import WriteContract


class SiteContract(
    NamespaceContract,
    WriteContract,
    AtomicContract,
    WriterContract,
    ScanContract,
    ChangeContract,
    SnapshotContract,
    SubscriptionContract,
    TransactionContract,
    SerializingContract,
    WatchingContract,
    FeedContract,
    StreamContract,
    MergingContract,
    MergedCopiesContract,
    VerifyingContract,
    AdministrationContract,
    RefusalContract,
    ClosingContract,
    HistoryContract,
):
    """The contract of `floodmark.Site`, wherever its data is."""
