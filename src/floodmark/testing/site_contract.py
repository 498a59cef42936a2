"""What every site must do, as tests.  Derive a class from `SiteContract` and say how a site is opened.

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

The parts stand in files of their own, and may be run alone: namespaces, writes, the writer, scans, changes,
snapshots, subscriptions, transactions, feeds, streams from outside, merging, verifying, administration,
refusals, closing, histories.
"""

from floodmark.testing.site_contract_administration import AdministrationContract
from floodmark.testing.site_contract_changes import ChangeContract
from floodmark.testing.site_contract_closing import ClosingContract
from floodmark.testing.site_contract_feeds import FeedContract
from floodmark.testing.site_contract_histories import HistoryContract
from floodmark.testing.site_contract_merged_copies import MergedCopiesContract
from floodmark.testing.site_contract_merging import MergingContract
from floodmark.testing.site_contract_namespaces import NamespaceContract
from floodmark.testing.site_contract_refusals import RefusalContract
from floodmark.testing.site_contract_scans import ScanContract
from floodmark.testing.site_contract_snapshots import SnapshotContract
from floodmark.testing.site_contract_streams import StreamContract
from floodmark.testing.site_contract_subscriptions import SubscriptionContract
from floodmark.testing.site_contract_transactions import TransactionContract
from floodmark.testing.site_contract_verifying import VerifyingContract
from floodmark.testing.site_contract_writer import WriterContract
from floodmark.testing.site_contract_writes import WriteContract


class SiteContract(
    NamespaceContract,
    WriteContract,
    WriterContract,
    ScanContract,
    ChangeContract,
    SnapshotContract,
    SubscriptionContract,
    TransactionContract,
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
