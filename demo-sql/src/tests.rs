//! Workers and sessions in one process, where streams can be left unread, and workers that lie.

use std::path::Path;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion::prelude::SessionContext;
use datafusion_distributed::{ChannelResolver, ExecuteTaskRequest, ProducerHeadSpec, TaskKey};
use futures_util::{StreamExt, TryStreamExt};
use http::HeaderMap;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use url::Url;
use uuid::Uuid;

use crate::Transport;
use crate::client::Resolver;
use crate::messages::{execute_from_bytes, execute_to_bytes};
use crate::run::statuses;
use crate::session::{Planning, session, url};
use crate::tables::Size;
use crate::wire::{ALL, GREETING, HEAD, Head, Kind, LARGEST_WINDOW, greeting};

const WINDOW: usize = 64 << 10;

/// What a piece of rows may be longer than the window's last byte: about a piece, rounded up.
const FRAME: usize = 2 << 20;

const LINES: i64 = 40_000;

/// Its rows come from all workers, and are far more than a window.
const MANY: &str = "SELECT a.order_id, a.note, b.note FROM lines a JOIN lines b ON a.order_id = b.order_id";

struct Cluster {
    addresses: Vec<String>,
    resolver: Resolver,
    context: SessionContext,
    tables: tempfile::TempDir,
}

impl Cluster {
    async fn new(workers: usize) -> Self {
        let tables = tempfile::tempdir().unwrap();
        let folder = tables.path().join("tables");
        crate::tables::generate(&folder, Size::Rows(LINES.cast_unsigned())).await.unwrap();
        Self::over(workers, tables).await
    }

    async fn over(workers: usize, tables: tempfile::TempDir) -> Self {
        let folder = tables.path().join("tables");
        let mut addresses = Vec::new();
        for _ in 0..workers {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            addresses.push(listener.local_addr().unwrap().to_string());
            tokio::spawn(crate::worker::run(listener, Resolver::new(WINDOW)));
        }
        let resolver = Resolver::new(WINDOW);
        let context = context(&addresses, &resolver, &folder).await;
        Self { addresses, resolver, context, tables }
    }

    async fn unread(&self) -> usize {
        let mut most = 0;
        for address in &self.addresses {
            let url = url(Transport::Thallus, address).unwrap();
            most = most.max(self.resolver.connection(&url).await.unwrap().unread());
        }
        most
    }

    /// Until no worker has anything at work, and nothing that was received waits here.
    async fn is_idle(&self) {
        let began = Instant::now();
        loop {
            let statuses = statuses(&self.addresses, &self.resolver).await.unwrap();
            let unread = self.unread().await;
            if unread == 0 && statuses.iter().all(|status| (status.partitions, status.plans) == (0, 0)) {
                return;
            }
            assert!(began.elapsed() < Duration::from_secs(30), "{unread}, {statuses:?}");
            tokio::task::yield_now().await;
        }
    }
}

async fn context(addresses: &[String], resolver: &Resolver, folder: &Path) -> SessionContext {
    let planning = Planning {
        data: Some(folder.to_owned()),
        partitions: Some(2),
        scan_bytes: 1,
        options: [
            "datafusion.optimizer.hash_join_single_partition_threshold=0",
            "datafusion.optimizer.hash_join_single_partition_threshold_rows=0",
        ]
        .map(str::to_owned)
        .into(),
    };
    let urls = addresses.iter().map(|address| url(Transport::Thallus, address).unwrap()).collect();
    session(urls, resolver, &planning).await.unwrap()
}

async fn count(context: &SessionContext, query: &str) -> i64 {
    let query = format!("SELECT count(*) FROM ({query})");
    let batches: Vec<RecordBatch> = context.sql(&query).await.unwrap().collect().await.unwrap();
    batches[0].column(0).as_primitive::<Int64Type>().value(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stops_holds_up_nobody_else_and_little_memory() {
    let cluster = Cluster::new(2).await;
    let mut slow = cluster.context.sql(MANY).await.unwrap().execute_stream().await.unwrap();
    let first = slow.next().await.unwrap().unwrap();
    for _ in 0..3 {
        assert_eq!(count(&cluster.context, "SELECT * FROM lines").await, LINES);
        assert_eq!(count(&cluster.context, MANY).await, 4 * LINES);
        // Four partitions of that query at most read from a worker at once: two tasks, two partitions.
        let unread = cluster.unread().await;
        assert!(unread <= 4 * (WINDOW + FRAME), "{unread}");
    }
    let rest: Vec<RecordBatch> = slow.try_collect().await.unwrap();
    let rows: usize = rest.iter().map(RecordBatch::num_rows).sum();
    assert_eq!((first.num_rows() + rows) as i64, 4 * LINES);
    cluster.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_dropped_leaves_nothing_at_work() {
    let cluster = Cluster::new(3).await;
    for batches in [0, 1, 3] {
        let mut stream = cluster.context.sql(MANY).await.unwrap().execute_stream().await.unwrap();
        for _ in 0..batches {
            stream.next().await.unwrap().unwrap();
        }
        drop(stream);
        cluster.is_idle().await;
    }
    assert_eq!(count(&cluster.context, MANY).await, 4 * LINES);
    cluster.is_idle().await;
}

/// A worker that greets, waits for a request of a kind, and answers with a frame.
async fn liar(kind: Kind, answer: impl Fn(u64) -> Vec<u8> + Send + Sync + 'static) -> Url {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        // Who has found it out connects again for the next request.
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = lie(&mut stream, kind, &answer).await;
        }
    });
    url(Transport::Thallus, &address).unwrap()
}

/// Ends with the connection.
async fn lie(stream: &mut TcpStream, kind: Kind, answer: &impl Fn(u64) -> Vec<u8>) -> std::io::Result<()> {
    stream.read_exact(&mut [0; GREETING]).await?;
    stream.write_all(&greeting()).await?;
    loop {
        let mut head = [0; HEAD];
        stream.read_exact(&mut head).await?;
        let head = Head::from_bytes(&head).unwrap();
        stream.read_exact(&mut vec![0; head.length]).await?;
        if head.kind == kind {
            stream.write_all(&answer(head.request)).await?;
        }
    }
}

/// A frame that is no good, in answer to a request.
fn frame(kind: Kind, partition: u32, length: usize) -> impl Fn(u64) -> Vec<u8> {
    move |request| {
        let head = Head { length, ..Head::new(kind, request, partition) };
        [&head.to_bytes()[..], &vec![0; length]].concat()
    }
}

/// Of a task that no query has.
fn two_partitions() -> ExecuteTaskRequest {
    let task_key = TaskKey { query_id: Uuid::nil(), stage_id: 0, task_number: 0 };
    let (target_partition_start, target_partition_end) = (0, 2);
    let producer_head_spec = ProducerHeadSpec::None;
    ExecuteTaskRequest { task_key, target_partition_start, target_partition_end, producer_head_spec }
}

/// Whatever a partition has would wait at the worker for a client that does not read.
#[tokio::test(flavor = "multi_thread")]
async fn credit_beyond_all_bounds_ends_the_connection() {
    let cluster = Cluster::new(1).await;
    let body = execute_to_bytes(two_partitions());
    let execute = Head { length: body.len(), ..Head::new(Kind::Execute, 1, ALL) }.to_bytes();
    let credit = |value| Head { value, ..Head::new(Kind::Credit, 1, 0) }.to_bytes();
    let status = Head::new(Kind::Status, 2, ALL).to_bytes();
    for (more, ends) in [(LARGEST_WINDOW - 1, false), (LARGEST_WINDOW, true), (u64::MAX, true)] {
        let mut stream = TcpStream::connect(&cluster.addresses[0]).await.unwrap();
        let sent = [&greeting()[..], &execute, &body, &credit(1), &credit(more), &status].concat();
        stream.write_all(&sent).await.unwrap();
        stream.read_exact(&mut [0; GREETING]).await.unwrap();
        let mut head = [0; HEAD];
        let answer = tokio::time::timeout(Duration::from_secs(8), stream.read_exact(&mut head)).await;
        assert_eq!(answer.unwrap().is_err(), ends, "{more}");
    }
}

/// All queries of a process share a connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_too_many_fails_and_no_other() {
    let cluster = Cluster::new(2).await;
    let mut going_on = cluster.context.sql(MANY).await.unwrap().execute_stream().await.unwrap();
    let first = going_on.next().await.unwrap().unwrap();
    let context = SessionContext::new().task_ctx();
    let url = url(Transport::Thallus, &cluster.addresses[0]).unwrap();
    let mut channel = cluster.resolver.get_worker_client_for_url(&url).await.unwrap();
    let mut asked = Vec::new();
    for _ in 0..=4096 {
        let (many, metrics) = (two_partitions(), ExecutionPlanMetricsSet::new());
        asked.push(channel.execute_task(HeaderMap::new(), many, metrics, &context).await.unwrap());
    }
    let error = asked.last_mut().unwrap()[1].next().await.unwrap().unwrap_err().to_string();
    assert!(error.contains("more than 4096 requests at a time"), "{error}");
    drop(asked);
    let rest: Vec<RecordBatch> = going_on.try_collect().await.unwrap();
    let rows: usize = rest.iter().map(RecordBatch::num_rows).sum();
    assert_eq!((first.num_rows() + rows) as i64, 4 * LINES);
    cluster.is_idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_nobody_has_given_credit_for_end_the_connection() {
    let url = liar(Kind::Execute, frame(Kind::Rows, 0, 64)).await;
    let resolver = Resolver::new(WINDOW);
    let mut channel = resolver.get_worker_client_for_url(&url).await.unwrap();
    let context = SessionContext::new().task_ctx();
    let connection = resolver.connection(&url).await.unwrap();
    let streams = channel
        .execute_task(HeaderMap::new(), two_partitions(), ExecutionPlanMetricsSet::new(), &context)
        .await
        .unwrap();
    while connection.lives() {
        tokio::task::yield_now().await;
    }
    for mut stream in streams {
        let error = stream.next().await.unwrap().unwrap_err().to_string();
        assert!(error.contains("is gone: it breaks the protocol: rows without credit"), "{error}");
        assert!(stream.next().await.is_none());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_lies_is_an_error_of_the_query() {
    let cases = [
        (liar(Kind::Credit, frame(Kind::Rows, 0, 64)).await, "continuation marker"),
        (liar(Kind::Credit, frame(Kind::Rows, 4711, 64)).await, "which nobody asked for"),
        (liar(Kind::Execute, frame(Kind::Report, ALL, 0)).await, "as an answer to something else"),
        (liar(Kind::Execute, frame(Kind::Execute, ALL, 0)).await, "from a worker"),
        (liar(Kind::Execute, |_| vec![0xff; HEAD]).await, "a frame of kind"),
        (liar(Kind::Execute, frame(Kind::Failed, ALL, 8)).await, "worker 127.0.0.1:"),
    ];
    let tables = tempfile::tempdir().unwrap();
    let folder = tables.path().join("tables");
    crate::tables::generate(&folder, Size::Rows(1000)).await.unwrap();
    for (url, says) in cases {
        let address = url.authority().to_owned();
        // Two tasks of one worker.
        let context = context(&[address.clone(), address.clone()], &Resolver::new(WINDOW), &folder).await;
        let query = context.sql("SELECT item, count(*) FROM lines GROUP BY item").await.unwrap();
        let error =
            tokio::time::timeout(Duration::from_secs(30), query.collect()).await.expect(says).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(says) && text.contains(&address), "{says}: {text}");
    }
}

/// A worker that takes plans and sends nothing, and closes connections of those that ask for rows of the first stage: other workers.
async fn dying() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                stream.read_exact(&mut [0; GREETING]).await?;
                stream.write_all(&greeting()).await?;
                loop {
                    let mut head = [0; HEAD];
                    stream.read_exact(&mut head).await?;
                    let head = Head::from_bytes(&head).unwrap();
                    let mut body = vec![0; head.length];
                    stream.read_exact(&mut body).await?;
                    if head.kind == Kind::Execute && execute_from_bytes(&body).unwrap().task_key.stage_id == 1
                    {
                        return std::io::Result::Ok(());
                    }
                }
            });
        }
    });
    address
}

/// Otherwise the last of many queries would wait many times as long for a host that does not answer.
#[tokio::test(flavor = "multi_thread")]
async fn all_wait_together_for_a_worker_that_does_not_answer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let resolver = Resolver::new(WINDOW);
    let url = url(Transport::Thallus, &listener.local_addr().unwrap().to_string()).unwrap();
    let deaf = tokio::spawn(async move {
        let mut tries = 0;
        while let Ok(accepted) = tokio::time::timeout(Duration::from_secs(1), listener.accept()).await {
            tries += 1;
            tokio::time::sleep(Duration::from_millis(200)).await;
            drop(accepted);
        }
        tries
    });
    let asking = (0..8).map(|_| resolver.connection(&url));
    for outcome in futures_util::future::join_all(asking).await {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("can't be reached"), "{error}");
    }
    assert_eq!(deaf.await.unwrap(), 1);
    // Who asks later tries again.
    assert!(resolver.connection(&url).await.unwrap_err().to_string().contains("refused"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_tells_which_other_worker_is_gone() {
    let mut cluster = Cluster::new(1).await;
    let (lives, dies) = (cluster.addresses[0].clone(), dying().await);
    let folder = cluster.tables.path().join("tables");
    let context = context(&[lives.clone(), dies.clone()], &cluster.resolver, &folder).await;
    let query = context.sql("SELECT item, count(*) FROM lines GROUP BY item").await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(30), query.collect()).await;
    let text = ended.expect("it ends").unwrap_err().to_string();
    assert!(text.contains(&format!("worker {lives}: worker {dies} is gone: ")), "{text}");
    cluster.is_idle().await;
    // The other one goes on.
    cluster.context = self::context(&[lives], &cluster.resolver, &folder).await;
    assert_eq!(count(&cluster.context, "SELECT * FROM lines").await, LINES);
}

#[tokio::test(flavor = "multi_thread")]
async fn tables_of_tpc_c_are_those_of_its_initial_population() {
    let tables = tempfile::tempdir().unwrap();
    let folder = tables.path().join("tables");
    crate::tables::generate(&folder, Size::Warehouses(2)).await.unwrap();
    let cluster = Cluster::over(2, tables).await;
    let lines = count(&cluster.context, "SELECT * FROM order_line").await;
    for (expected, query) in [
        (
            60_000,
            "SELECT DISTINCT c_id, c_d_id, c_w_id FROM customer WHERE c_id <= 3000 AND c_d_id <= 10 AND c_w_id <= 2",
        ),
        // Each customer has one order.
        (
            60_000,
            "SELECT DISTINCT o_id, o_d_id, o_w_id FROM orders JOIN customer ON o_c_id = c_id AND o_d_id = c_d_id AND o_w_id = c_w_id",
        ),
        (60_000, "SELECT DISTINCT o_c_id, o_d_id, o_w_id FROM orders WHERE o_id <= 3000"),
        (
            18_000,
            "SELECT DISTINCT no_o_id, no_d_id, no_w_id FROM new_order WHERE no_o_id BETWEEN 2101 AND 3000",
        ),
        (
            60_000,
            "SELECT * FROM orders WHERE o_ol_cnt BETWEEN 5 AND 15 AND (o_carrier_id IS NULL) = (o_id > 2100)",
        ),
        (11, "SELECT DISTINCT o_ol_cnt FROM orders"),
        (
            lines,
            "SELECT DISTINCT ol_o_id, ol_d_id, ol_w_id, ol_number FROM order_line WHERE ol_amount >= 0 AND ol_i_id <= 100000",
        ),
        (
            lines,
            "SELECT * FROM order_line JOIN orders ON ol_o_id = o_id AND ol_d_id = o_d_id AND ol_w_id = o_w_id WHERE ol_number <= o_ol_cnt",
        ),
        (1, &format!("SELECT 1 WHERE (SELECT sum(o_ol_cnt) FROM orders) = {lines}")),
        (
            lines,
            "SELECT * FROM order_line WHERE (ol_delivery_d IS NULL) = (ol_o_id > 2100) AND (ol_amount > 0) = (ol_o_id > 2100)",
        ),
    ] {
        assert_eq!(count(&cluster.context, query).await, expected, "{query}");
    }
    let alone = context(&[], &Resolver::new(WINDOW), &folder).await;
    let [joined, summed] = crate::tables::queries(&alone).unwrap() else { panic!("two queries") };
    for query in [joined, summed] {
        let of = async |context: &SessionContext| {
            let batches = context.sql(query).await.unwrap().collect().await.unwrap();
            pretty_format_batches(&batches).unwrap().to_string()
        };
        assert_eq!(of(&cluster.context).await, of(&alone).await);
    }
    assert_eq!(count(&alone, summed).await, 15);
    // A 26th of the customers, whose order is new in three of ten cases.
    assert!((600..800).contains(&count(&alone, joined).await));
}
