//! The side that is asked: one connection's requests, each partition in a task of its own that waits for credit.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use arrow_array::cast::AsArray;
use arrow_array::types::ByteViewType;
use arrow_array::{ArrayRef, GenericByteViewArray, RecordBatch, RecordBatchOptions};
use arrow_buffer::Buffer;
use datafusion::common::{DataFusionError, Result, exec_datafusion_err};
use datafusion::execution::SendableRecordBatchStream;
use datafusion_distributed::{
    CoordinatorToWorkerMsg, ExecuteTaskRequest, TaskKey, Worker, WorkerToCoordinatorMsg,
};
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use thallus_columnar::Message;
use thallus_shuffle::Pool;
use thallus_shuffle::stream::{Out, bytes};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;

use crate::carried::End;
use crate::client::cost;
use crate::link::{Body, Link, read_frames};
use crate::messages::{at_worker, execute_from_bytes, headers_from_bytes, to_coordinator};
use crate::wire::{ALL, Head, Kind, LARGEST_WINDOW};

/// Requests of one connection at a time. All queries of a process share it, so one more fails, and nothing else.
const MOST_REQUESTS: usize = 4096;

/// Partitions of these.
const MOST_PARTITIONS: usize = 1 << 18;

/// Bytes of rows that are sent in one piece, if more than one row.
const PIECE: usize = 1 << 20;

/// What who asks for rows is told then.
const OVER: &str = "the query is over";

/// What a worker has at work for all connections.
#[derive(Debug, Default)]
pub(crate) struct Live {
    /// Partitions that are being sent.
    pub(crate) partitions: AtomicUsize,
    /// Plans that have been set, and not taken away.
    pub(crate) plans: AtomicUsize,
}

/// Counts until it is dropped.
#[derive(Debug)]
struct Counted(Arc<Live>, fn(&Live) -> &AtomicUsize);

impl Counted {
    fn new(live: &Arc<Live>, of: fn(&Live) -> &AtomicUsize) -> Self {
        of(live).fetch_add(1, Ordering::Relaxed);
        Self(live.clone(), of)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.1(&self.0).fetch_sub(1, Ordering::Relaxed);
    }
}

/// A task that ends when this is dropped.
#[derive(Debug)]
struct Task(AbortHandle);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[derive(Debug)]
enum Request {
    Channel(Channel),
    Rows(Rows),
}

/// The coordinator's channel of a task. It is over when neither side has more to say.
#[derive(Debug)]
struct Channel {
    /// From the plan on, until the coordinator has said all.
    plan: Option<Plan>,
    /// Whether the worker may have more to say.
    reporting: bool,
    reports: Option<Task>,
    /// What it is told.
    messages: Option<UnboundedSender<Result<CoordinatorToWorkerMsg>>>,
    _counted: Counted,
}

/// What the engine says of a task.
type Reports = BoxStream<'static, Result<WorkerToCoordinatorMsg>>;

#[derive(Debug)]
struct Rows {
    gates: Vec<Arc<Gate>>,
    partitions: Vec<Partition>,
    /// Those that are not over.
    left: usize,
    served: Served,
    /// Gets the streams.
    _beginning: Task,
}

#[derive(Debug)]
enum Partition {
    Waiting,
    Running { _task: Task },
    Over,
}

impl Rows {
    /// Whether it was the last.
    fn over(&mut self, partition: u32) -> bool {
        if let Some(slot) = self.partitions.get_mut(partition as usize)
            && !matches!(slot, Partition::Over)
        {
            *slot = Partition::Over;
            self.left -= 1;
        }
        self.left == 0
    }
}

/// Credit of one partition.
#[derive(Debug, Default)]
struct Gate {
    credit: Mutex<i64>,
    more: Notify,
}

impl Gate {
    /// False if that is more than anybody may give.
    fn give(&self, bytes: u64) -> bool {
        let mut credit = self.lock();
        let sum = credit.saturating_add_unsigned(bytes);
        if sum > LARGEST_WINDOW.cast_signed() {
            return false;
        }
        *credit = sum;
        drop(credit);
        self.more.notify_one();
        true
    }

    /// Until there is some.
    async fn open(&self) {
        while *self.lock() <= 0 {
            self.more.notified().await;
        }
    }

    fn take(&self, bytes: i64) {
        let mut credit = self.lock();
        *credit = credit.saturating_sub(bytes);
    }

    fn lock(&self) -> MutexGuard<'_, i64> {
        self.credit.lock().expect("nobody panics with it")
    }
}

/// What all connections of a worker share.
pub(crate) struct Host {
    pub(crate) worker: Worker,
    /// Where plans are run.
    pub(crate) engine: Handle,
    pub(crate) pool: Arc<Pool>,
    pub(crate) live: Arc<Live>,
    /// Answers Status.
    pub(crate) status: Box<dyn Fn() -> Vec<u8> + Send + Sync>,
    pub(crate) served: Mutex<Requests>,
}

/// By task, requests for its rows, of whatever connection.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    next: u64,
    /// Tasks whose queries go on.
    live: HashSet<TaskKey>,
    by_task: HashMap<TaskKey, HashMap<u64, (Weak<Session>, u64)>>,
}

impl Host {
    fn enter(self: &Arc<Self>, task: TaskKey, session: Weak<Session>, request: u64) -> Served {
        let mut served = self.served();
        let number = served.next;
        served.next += 1;
        served.by_task.entry(task).or_default().insert(number, (session, request));
        Served { host: self.clone(), task, number }
    }

    fn served(&self) -> MutexGuard<'_, Requests> {
        self.served.lock().expect("nobody panics with it")
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Host").field("live", &self.live).finish_non_exhaustive()
    }
}

/// A request among those of its task, until it is dropped.
#[derive(Debug)]
struct Served {
    host: Arc<Host>,
    task: TaskKey,
    number: u64,
}

impl Drop for Served {
    fn drop(&mut self) {
        let mut served = self.host.served();
        if let Entry::Occupied(mut requests) = served.by_task.entry(self.task) {
            requests.get_mut().remove(&self.number);
            if requests.get().is_empty() {
                requests.remove();
            }
        }
    }
}

/// A task whose query goes on. When that is over, so are requests for the task's rows: those who made them may not say so for long,
/// since the engine keeps streams that it has never polled in a cache.
#[derive(Debug)]
struct Plan {
    host: Arc<Host>,
    task: TaskKey,
}

impl Plan {
    fn new(host: &Arc<Host>, task: TaskKey) -> Self {
        host.served().live.insert(task);
        Self { host: host.clone(), task }
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        let (host, task) = (self.host.clone(), self.task);
        // Later, since this is dropped where requests are locked.
        self.host.engine.spawn(async move {
            let requests = {
                let mut served = host.served();
                served.live.remove(&task);
                served.by_task.remove(&task).unwrap_or_default()
            };
            for (session, request) in requests.into_values() {
                if let Some(session) = session.upgrade()
                    && session.requests().remove(&request).is_some()
                {
                    session.link.fail(request, ALL, OVER);
                }
            }
        });
    }
}

#[derive(Debug)]
struct Session {
    host: Arc<Host>,
    link: Link,
    requests: Mutex<HashMap<u64, Request>>,
}

/// Serves a connection whose greetings have been exchanged, until it ends; returns why. Then nothing of it is left.
pub(crate) async fn serve(host: Arc<Host>, end: Arc<End>) -> String {
    let session =
        Arc::new(Session { host: host.clone(), link: Link::new(end.clone()), requests: Mutex::default() });
    let why = read_frames(&end, &host.pool, |head, body| session.take(head, body)).await;
    end.close();
    session.requests().clear();
    why
}

impl Session {
    fn take(self: &Arc<Self>, head: Head, body: Buffer) -> std::result::Result<(), String> {
        let Head { kind, request, partition, value, .. } = head;
        let mut requests = self.requests();
        if let Kind::Open | Kind::Execute = kind {
            if requests.contains_key(&request) {
                return Err(format!("a second request {request}"));
            }
            if requests.len() >= MOST_REQUESTS {
                self.link.fail(request, ALL, &format!("more than {MOST_REQUESTS} requests at a time"));
                return Ok(());
            }
        }
        match kind {
            Kind::Open => {
                requests.insert(request, Request::Channel(self.open(request, body)));
            }
            Kind::Tell => {
                if let Some(Request::Channel(Channel { plan, messages: Some(messages), .. })) =
                    requests.get_mut(&request)
                {
                    let message = at_worker(&body);
                    if let (Ok(CoordinatorToWorkerMsg::SetPlanRequest(set)), None) = (&message, &plan) {
                        *plan = Some(Plan::new(&self.host, set.task_key));
                    }
                    let _ = messages.send(message); // the plan has failed
                }
            }
            Kind::Told => {
                if let Some(Request::Channel(channel)) = requests.get_mut(&request) {
                    (channel.messages, channel.plan) = (None, None);
                    if !channel.reporting {
                        requests.remove(&request);
                    }
                }
            }
            Kind::Execute => match execute_from_bytes(&body) {
                Err(error) => self.link.fail(request, ALL, &text(&error)),
                Ok(execute) => {
                    let count = |request: &Request| match request {
                        Request::Rows(rows) => rows.partitions.len(),
                        Request::Channel(_) => 0,
                    };
                    let partitions = requests.values().map(count).sum::<usize>();
                    if partitions + (execute.target_partition_end - execute.target_partition_start)
                        > MOST_PARTITIONS
                    {
                        let why = format!("more than {MOST_PARTITIONS} partitions at a time");
                        self.link.fail(request, ALL, &why);
                        return Ok(());
                    }
                    requests.insert(request, Request::Rows(self.execute(request, execute)));
                }
            },
            Kind::Credit => {
                if let Some(Request::Rows(rows)) = requests.get(&request)
                    && let Some(gate) = rows.gates.get(partition as usize)
                    && !gate.give(value)
                {
                    return Err(format!("credit for more than {LARGEST_WINDOW} bytes"));
                }
            }
            Kind::Cancel => {
                let over = match requests.get_mut(&request) {
                    Some(Request::Rows(rows)) if partition != ALL => rows.over(partition),
                    _ => true,
                };
                if over {
                    requests.remove(&request);
                }
            }
            Kind::Status => self.answer(request, (self.host.status)()),
            Kind::Info => self.answer(request, self.host.worker.version().into()),
            Kind::Report | Kind::Rows | Kind::End | Kind::Failed | Kind::Answer => {
                return Err(format!("{kind:?} to a worker"));
            }
        }
        Ok(())
    }

    fn answer(&self, request: u64, answer: Vec<u8>) {
        self.link.send(Head::new(Kind::Answer, request, ALL), Body::Bytes(answer));
    }

    fn open(self: &Arc<Self>, request: u64, headers: Buffer) -> Channel {
        let (messages, received) = unbounded_channel();
        let this = self.clone();
        // Not ended with the request: the engine would keep what it has of a plan. It gives up when there are no more messages.
        self.host.engine.spawn(async move {
            match guarded(this.set_plan(&headers, received)).await {
                Ok(reports) => this.begin_reports(request, reports),
                Err(error) => this.reported(request, Err(error)),
            }
        });
        Channel {
            plan: None,
            reporting: true,
            reports: None,
            messages: Some(messages),
            _counted: Counted::new(&self.host.live, |live| &live.plans),
        }
    }

    async fn set_plan(
        &self,
        headers: &[u8],
        messages: UnboundedReceiver<Result<CoordinatorToWorkerMsg>>,
    ) -> Result<Reports> {
        let next = |mut messages: UnboundedReceiver<_>| async { Some((messages.recv().await?, messages)) };
        let messages = futures_util::stream::unfold(messages, next).boxed();
        self.host.worker.coordinator_channel(headers_from_bytes(headers)?, messages).await
    }

    fn begin_reports(self: &Arc<Self>, request: u64, reports: Reports) {
        let mut requests = self.requests();
        let Some(Request::Channel(channel)) = requests.get_mut(&request) else { return };
        let this = self.clone();
        let task = self.host.engine.spawn(async move {
            let outcome = guarded(this.report(request, reports)).await;
            this.reported(request, outcome);
        });
        channel.reports = Some(Task(task.abort_handle()));
    }

    async fn report(&self, request: u64, mut reports: Reports) -> Result<()> {
        while let Some(report) = reports.next().await {
            if let Some(bytes) = to_coordinator(report?) {
                self.link.send(Head::new(Kind::Report, request, ALL), Body::Bytes(bytes));
            }
        }
        Ok(())
    }

    fn reported(&self, request: u64, outcome: Result<()>) {
        let mut requests = self.requests();
        let Some(Request::Channel(channel)) = requests.get_mut(&request) else { return };
        channel.reporting = false;
        let over = channel.messages.is_none() || outcome.is_err();
        match outcome {
            Ok(()) => self.link.say(Head::new(Kind::End, request, ALL)),
            Err(error) => self.link.fail(request, ALL, &text(&error)),
        }
        if over {
            requests.remove(&request);
        }
    }

    fn execute(self: &Arc<Self>, request: u64, execute: ExecuteTaskRequest) -> Rows {
        let partitions = execute.target_partition_end - execute.target_partition_start;
        let served = self.host.enter(execute.task_key, Arc::downgrade(self), request);
        let this = self.clone();
        let task = self.host.engine.spawn(async move {
            match guarded(this.host.worker.execute_task(execute)).await {
                Ok((streams, _)) => this.begin(request, streams),
                Err(error) => {
                    this.requests().remove(&request);
                    this.link.fail(request, ALL, &text(&error));
                }
            }
        });
        Rows {
            gates: (0..partitions).map(|_| Arc::default()).collect(),
            partitions: (0..partitions).map(|_| Partition::Waiting).collect(),
            left: partitions,
            served,
            _beginning: Task(task.abort_handle()),
        }
    }

    /// The plan's streams, of which some may not be wanted any more.
    fn begin(self: &Arc<Self>, request: u64, streams: Vec<SendableRecordBatchStream>) {
        let mut requests = self.requests();
        let Some(Request::Rows(rows)) = requests.get_mut(&request) else { return };
        // Asked for too late for the end of the query to end it.
        if !self.host.served().live.contains(&rows.served.task) {
            requests.remove(&request);
            return self.link.fail(request, ALL, OVER);
        }
        let slots = rows.partitions.iter_mut().zip(&rows.gates);
        for ((partition, stream), (slot, gate)) in (0..ALL).zip(streams).zip(slots) {
            if let Partition::Waiting = slot {
                let (this, gate) = (self.clone(), gate.clone());
                let counted = Counted::new(&self.host.live, |live| &live.partitions);
                let task = self.host.engine.spawn(async move {
                    let outcome = guarded(this.send(request, partition, stream, &gate)).await;
                    this.sent(request, partition, outcome);
                    drop(counted);
                });
                *slot = Partition::Running { _task: Task(task.abort_handle()) };
            }
        }
    }

    async fn send(
        &self,
        request: u64,
        partition: u32,
        mut stream: SendableRecordBatchStream,
        gate: &Gate,
    ) -> Result<()> {
        gate.open().await;
        let mut out = Out::new(&stream.schema()).map_err(external)?;
        while let Some(batch) = stream.next().await {
            for piece in pieces(batch?)? {
                gate.open().await;
                let messages = out.frame(&piece).map_err(external)?;
                gate.take(cost(messages.iter().map(Message::encoded_len).sum()));
                self.link.send(Head::new(Kind::Rows, request, partition), Body::Messages(messages));
            }
        }
        Ok(())
    }

    fn sent(&self, request: u64, partition: u32, outcome: Result<()>) {
        match outcome {
            Ok(()) => self.link.say(Head::new(Kind::End, request, partition)),
            Err(error) => self.link.fail(request, partition, &text(&error)),
        }
        let mut requests = self.requests();
        if let Some(Request::Rows(rows)) = requests.get_mut(&request)
            && rows.over(partition)
        {
            requests.remove(&request);
        }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<u64, Request>> {
        self.requests.lock().expect("nobody panics with it")
    }
}

/// A panic of the engine is an error of this query.
async fn guarded<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let said = |panic: Box<dyn std::any::Any + Send>| match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => {
            panic.downcast::<&str>().map_or_else(|_| "for no reason".to_owned(), |text| (*text).to_owned())
        }
    };
    AssertUnwindSafe(work)
        .catch_unwind()
        .await
        .unwrap_or_else(|panic| Err(exec_datafusion_err!("the plan panicked: {}", said(panic))))
}

/// Without the type that errors of one worker after the other would repeat.
fn text(error: &DataFusionError) -> String {
    match error {
        DataFusionError::Execution(text) => text.clone(),
        DataFusionError::Shared(error) => text(error),
        error => error.to_string(),
    }
}

fn external(error: thallus_shuffle::Error) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

/// A batch in pieces of about [`PIECE`] bytes, without memory that no row of it refers to.
fn pieces(batch: RecordBatch) -> Result<Vec<RecordBatch>> {
    let batch = compact(batch)?;
    let (rows, bytes) = (batch.num_rows(), bytes(&batch));
    if bytes <= PIECE || rows < 2 {
        return Ok(if rows == 0 { Vec::new() } else { vec![batch] });
    }
    let each = (rows as u64 * PIECE as u64 / bytes as u64).max(1) as usize;
    (0..rows).step_by(each).map(|at| compact(batch.slice(at, each.min(rows - at)))).collect()
}

/// Views keep all memory that any of the batches had from which they were taken: with more of that than they need, they are copied.
fn compact(batch: RecordBatch) -> Result<RecordBatch> {
    fn gc<T: ByteViewType>(array: &GenericByteViewArray<T>) -> Option<ArrayRef> {
        let has: usize = array.data_buffers().iter().map(Buffer::len).sum();
        (has > 2 * array.total_buffer_bytes_used()).then(|| Arc::new(array.gc()) as ArrayRef)
    }
    let compacted = |column: &ArrayRef| {
        let views = column.as_string_view_opt().map(gc).or_else(|| column.as_binary_view_opt().map(gc));
        views.flatten().unwrap_or_else(|| column.clone())
    };
    let columns = batch.columns().iter().map(compacted).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows()));
    Ok(RecordBatch::try_new_with_options(batch.schema(), columns, &options)?)
}
