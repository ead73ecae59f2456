//! The side that asks: the engine's channels to workers, over one connection to each, which all queries of this process share.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use arrow_buffer::Buffer;
use async_trait::async_trait;
use datafusion::common::{DataFusionError, Result, exec_datafusion_err};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::metrics::ExecutionPlanMetricsSet;
use datafusion_distributed::{
    ChannelResolver, CoordinatorToWorkerMsg, ExecuteTaskRequest, GetWorkerInfoRequest, GetWorkerInfoResponse,
    WorkerChannel, WorkerToCoordinatorMsg, grpc,
};
use futures_util::stream::BoxStream;
use futures_util::{Stream, StreamExt};
use http::HeaderMap;
use thallus_shuffle::Pool;
use thallus_shuffle::stream::In;
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use url::Url;

use crate::carried::End;
use crate::link::{Body, Link, greet, io, prepare, read_frames};
use crate::messages::{at_coordinator, execute_to_bytes, headers_to_bytes, to_worker};
use crate::wire::{ALL, HEAD, Head, Kind};

/// Scheme of workers that are reached by this transport; all others are by the engine's own.
pub(crate) const SCHEME: &str = "thallus";

/// Until a connection is made and greeted.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes of received memory that are kept for later frames.
const KEPT: usize = 64 << 20;

/// Bytes of a partition that may come without having been read, and a frame.
pub(crate) const WINDOW: usize = 4 << 20;

/// What there is of a worker. Held while a connection is made.
#[derive(Default)]
struct Place {
    connection: Option<Arc<Connection>>,
    /// How the last try to make one has failed, and when.
    failed: Option<(Instant, String)>,
}

type Slot = Arc<tokio::sync::Mutex<Place>>;

/// Finds workers by their URLs.
#[derive(Clone)]
pub(crate) struct Resolver(Arc<Shared>);

struct Shared {
    window: usize,
    pool: Arc<Pool>,
    slots: Mutex<HashMap<String, Slot>>,
    grpc: grpc::DefaultChannelResolver,
}

impl Resolver {
    pub(crate) fn new(window: usize) -> Self {
        let (pool, grpc) = (Arc::new(Pool::new(KEPT)), grpc::DefaultChannelResolver::default());
        Self(Arc::new(Shared { window, pool, slots: Mutex::default(), grpc }))
    }

    /// The connection to a worker, made if there is none.
    pub(crate) async fn connection(&self, url: &Url) -> Result<Arc<Connection>> {
        let (Some(host), Some(port)) = (url.host_str(), url.port()) else {
            return Err(exec_datafusion_err!("worker {url}: no address"));
        };
        let address = format!("{host}:{port}");
        let slot =
            self.0.slots.lock().expect("nobody panics with it").entry(address.clone()).or_default().clone();
        let asked = Instant::now();
        let mut place = slot.lock().await;
        if let Some(connection) = place.connection.as_ref().filter(|connection| connection.lives()) {
            return Ok(connection.clone());
        }
        // Who has waited for a try does not wait for another one, one after the other.
        if let Some((when, why)) = &place.failed
            && *when >= asked
        {
            return Err(exec_datafusion_err!("{why}"));
        }
        let made = Connection::make(address.clone(), self.0.window, self.0.pool.clone());
        let made = io().spawn(async { timeout(PATIENCE, made).await }).await;
        let why = match made {
            Ok(Ok(Ok(connection))) => {
                place.connection = Some(connection.clone());
                return Ok(connection);
            }
            Ok(Ok(Err(error))) => format!("worker {address} can't be reached: {error}"),
            Ok(Err(_)) => format!("worker {address} can't be reached: it does not answer"),
            Err(error) => format!("worker {address}: {error}"),
        };
        place.failed = Some((Instant::now(), why.clone()));
        Err(exec_datafusion_err!("{why}"))
    }
}

#[async_trait]
impl ChannelResolver for Resolver {
    async fn get_worker_client_for_url(&self, url: &Url) -> Result<Box<dyn WorkerChannel>> {
        match url.scheme() {
            SCHEME => Ok(Box::new(Channel(self.connection(url).await?))),
            _ => self.0.grpc.get_worker_client_for_url(url).await,
        }
    }
}

/// A connection to a worker, and who waits for what of it.
#[derive(Debug)]
pub(crate) struct Connection {
    worker: String,
    link: Link,
    window: usize,
    /// Bytes of rows that nobody has read yet.
    unread: AtomicUsize,
    books: Mutex<Books>,
}

#[derive(Debug, Default)]
struct Books {
    next: u64,
    waiting: HashMap<u64, Waiting>,
    /// Why the connection has ended.
    gone: Option<String>,
}

#[derive(Debug)]
enum Waiting {
    Channel(UnboundedSender<Result<WorkerToCoordinatorMsg>>),
    /// One for each partition, until it has ended.
    Rows(Vec<Option<Inbox>>),
    Answer(oneshot::Sender<Result<Buffer>>),
}

/// Of a partition.
#[derive(Debug)]
struct Inbox {
    frames: UnboundedSender<Result<Buffer>>,
    /// What may come yet; below 0 by what the last frame was too long.
    credit: i64,
}

impl Connection {
    async fn make(worker: String, window: usize, pool: Arc<Pool>) -> std::io::Result<Arc<Self>> {
        let stream = TcpStream::connect(&worker).await?;
        prepare(&stream)?;
        let end = End::new(stream);
        greet(&end, &[]).await?;
        let connection = Arc::new(Self {
            worker,
            link: Link::new(end.clone()),
            window,
            unread: AtomicUsize::new(0),
            books: Mutex::default(),
        });
        // Not kept alive by its reader: without requests, and out of the resolver, it ends.
        let weak = Arc::downgrade(&connection);
        io().spawn(async move {
            let why = read_frames(&end, &pool, |head, body| match weak.upgrade() {
                Some(connection) => connection.take(head, body),
                None => Err("nobody is there any more".to_owned()),
            })
            .await;
            end.close();
            if let Some(connection) = weak.upgrade() {
                connection.ended(&why);
            }
        });
        Ok(connection)
    }

    pub(crate) fn lives(&self) -> bool {
        self.books().gone.is_none()
    }

    /// Bytes of rows that nobody has read yet.
    #[cfg(test)]
    pub(crate) fn unread(&self) -> usize {
        self.unread.load(Ordering::Relaxed)
    }

    pub(crate) async fn status(&self) -> Result<Buffer> {
        self.ask(Kind::Status).await
    }

    async fn ask(&self, kind: Kind) -> Result<Buffer> {
        let (sender, answer) = oneshot::channel();
        let request = self.enter(Waiting::Answer(sender))?;
        self.link.say(Head::new(kind, request, ALL));
        answer.await.map_err(|_| self.error("no answer"))?
    }

    fn enter(&self, waiting: Waiting) -> Result<u64> {
        let mut books = self.books();
        if let Some(why) = &books.gone {
            return Err(self.gone(why));
        }
        let request = books.next;
        books.next += 1;
        books.waiting.insert(request, waiting);
        Ok(request)
    }

    /// A frame. The text says what is wrong with it. What nobody wants any more still comes for a while.
    fn take(&self, head: Head, body: Buffer) -> Result<(), String> {
        if head.kind.asks() {
            return Err(format!("{:?} from a worker", head.kind));
        }
        let mut books = self.books();
        let Some(waiting) = books.waiting.get_mut(&head.request) else { return Ok(()) };
        let over = match (head.kind, waiting) {
            (Kind::Report, Waiting::Channel(sender)) => sender.send(at_coordinator(&body)).is_err(),
            (Kind::End, Waiting::Channel(_)) => true,
            (Kind::Failed, Waiting::Channel(sender)) => {
                let _ = sender.send(Err(self.said(&body))); // it is not wanted any more
                true
            }
            (Kind::Answer, Waiting::Answer(_)) => {
                if let Some(Waiting::Answer(sender)) = books.waiting.remove(&head.request) {
                    let _ = sender.send(Ok(body)); // as above
                }
                return Ok(());
            }
            (Kind::Rows | Kind::End | Kind::Failed, Waiting::Rows(inboxes)) => {
                self.rows(inboxes, head, body)?;
                inboxes.iter().all(Option::is_none)
            }
            (kind, _) => return Err(format!("{kind:?} as an answer to something else")),
        };
        if over {
            books.waiting.remove(&head.request);
        }
        Ok(())
    }

    fn rows(&self, inboxes: &mut [Option<Inbox>], head: Head, body: Buffer) -> Result<(), String> {
        if head.kind == Kind::Failed && head.partition == ALL {
            for inbox in inboxes.iter_mut().filter_map(Option::take) {
                let _ = inbox.frames.send(Err(self.said(&body))); // it is not wanted any more
            }
            return Ok(());
        }
        let slot = inboxes
            .get_mut(head.partition as usize)
            .ok_or_else(|| format!("rows of partition {}, which nobody asked for", head.partition))?;
        match (head.kind, slot.as_mut()) {
            // Cancelled, while it was on its way.
            (_, None) => {}
            (Kind::Rows, Some(inbox)) => {
                if inbox.credit <= 0 {
                    return Err("rows without credit".to_owned());
                }
                inbox.credit -= cost(body.len());
                self.unread.fetch_add(body.len(), Ordering::Relaxed);
                let length = body.len();
                if inbox.frames.send(Ok(body)).is_err() {
                    self.unread.fetch_sub(length, Ordering::Relaxed);
                }
            }
            (Kind::Failed, Some(inbox)) => {
                let _ = inbox.frames.send(Err(self.said(&body))); // it is not wanted any more
                *slot = None;
            }
            (_, Some(_)) => *slot = None,
        }
        Ok(())
    }

    fn ended(&self, why: &str) {
        let mut books = self.books();
        books.gone = Some(why.to_owned());
        for (_, waiting) in books.waiting.drain() {
            // Whoever does not listen does not want to know.
            match waiting {
                Waiting::Channel(sender) => drop(sender.send(Err(self.gone(why)))),
                Waiting::Answer(sender) => drop(sender.send(Err(self.gone(why)))),
                Waiting::Rows(inboxes) => {
                    for inbox in inboxes.into_iter().flatten() {
                        drop(inbox.frames.send(Err(self.gone(why))));
                    }
                }
            }
        }
    }

    /// Of one partition, from its reader: more may come.
    fn credit(&self, request: u64, partition: u32, bytes: usize) {
        if let Some(Waiting::Rows(inboxes)) = self.books().waiting.get_mut(&request)
            && let Some(Some(inbox)) = inboxes.get_mut(partition as usize)
        {
            inbox.credit += bytes as i64;
            let value = bytes as u64;
            self.link.say(Head { value, ..Head::new(Kind::Credit, request, partition) });
        }
    }

    /// A partition is not wanted any more.
    fn cancel(&self, request: u64, partition: u32) {
        let mut books = self.books();
        let Some(Waiting::Rows(inboxes)) = books.waiting.get_mut(&request) else { return };
        let Some(Some(_)) = inboxes.get_mut(partition as usize).map(Option::take) else { return };
        if inboxes.iter().all(Option::is_none) {
            books.waiting.remove(&request);
        }
        self.link.say(Head::new(Kind::Cancel, request, partition));
    }

    /// A channel is not wanted any more. The worker hears of it also if it has nothing more to say: it is not told any more either.
    fn cancel_channel(&self, request: u64) {
        self.books().waiting.remove(&request);
        self.link.say(Head::new(Kind::Cancel, request, ALL));
    }

    /// A channel can't go on, because of this side.
    fn give_up(&self, request: u64, error: DataFusionError) {
        if let Some(Waiting::Channel(sender)) = self.books().waiting.remove(&request) {
            let _ = sender.send(Err(error)); // it is not wanted any more
        }
        self.link.say(Head::new(Kind::Cancel, request, ALL));
    }

    fn error(&self, why: &str) -> DataFusionError {
        exec_datafusion_err!("worker {}: {why}", self.worker)
    }

    fn said(&self, text: &[u8]) -> DataFusionError {
        self.error(&String::from_utf8_lossy(text))
    }

    fn gone(&self, why: &str) -> DataFusionError {
        exec_datafusion_err!("worker {} is gone: {why}", self.worker)
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().expect("nobody panics with it")
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.link.end().close();
    }
}

/// What a frame takes from the credit of its partition.
pub(crate) fn cost(length: usize) -> i64 {
    (HEAD + length) as i64
}

/// The engine's channel to a worker.
#[derive(Debug)]
struct Channel(Arc<Connection>);

#[async_trait]
impl WorkerChannel for Channel {
    /// Does not wait for the worker: what is wrong with the plan comes by the stream.
    async fn coordinator_channel(
        &mut self,
        headers: HeaderMap,
        mut messages: BoxStream<'static, CoordinatorToWorkerMsg>,
    ) -> Result<BoxStream<'static, Result<WorkerToCoordinatorMsg>>> {
        let (sender, reports) = unbounded_channel();
        let request = self.0.enter(Waiting::Channel(sender))?;
        self.0.link.send(Head::new(Kind::Open, request, ALL), Body::Bytes(headers_to_bytes(&headers)));
        let connection = self.0.clone();
        let telling = tokio::spawn(async move {
            while let Some(message) = messages.next().await {
                match to_worker(message) {
                    Ok(bytes) => {
                        connection.link.send(Head::new(Kind::Tell, request, ALL), Body::Bytes(bytes))
                    }
                    Err(error) => return connection.give_up(request, error),
                }
            }
            connection.link.say(Head::new(Kind::Told, request, ALL));
        });
        let connection = self.0.clone();
        Ok(Reports { connection, request, reports, telling: telling.abort_handle(), ended: false }.boxed())
    }

    async fn execute_task(
        &mut self,
        _headers: HeaderMap,
        request: ExecuteTaskRequest,
        _metrics: ExecutionPlanMetricsSet,
        _context: &Arc<TaskContext>,
    ) -> Result<Vec<BoxStream<'static, Result<RecordBatch>>>> {
        let partitions = request.target_partition_end.saturating_sub(request.target_partition_start);
        let (inboxes, frames): (Vec<_>, Vec<_>) = (0..partitions)
            .map(|_| {
                let (sender, frames) = unbounded_channel();
                (Some(Inbox { frames: sender, credit: 0 }), frames)
            })
            .unzip();
        let number = self.0.enter(Waiting::Rows(inboxes))?;
        self.0.link.send(Head::new(Kind::Execute, number, ALL), Body::Bytes(execute_to_bytes(request)));
        let rows = |(partition, frames)| {
            let connection = self.0.clone();
            Rows {
                connection,
                request: number,
                partition,
                frames,
                stream: In::of_any_schema(),
                state: State::New,
                ready: VecDeque::new(),
                read: 0,
            }
            .boxed()
        };
        Ok((0..ALL).zip(frames).map(rows).collect())
    }

    async fn get_worker_info(&mut self, _request: GetWorkerInfoRequest) -> Result<GetWorkerInfoResponse> {
        let version = self.0.ask(Kind::Info).await?;
        Ok(GetWorkerInfoResponse { version: String::from_utf8_lossy(&version).into_owned() })
    }
}

/// What a worker says of a task. Dropped before its end, it takes the plan away from the worker.
#[derive(Debug)]
struct Reports {
    connection: Arc<Connection>,
    request: u64,
    reports: UnboundedReceiver<Result<WorkerToCoordinatorMsg>>,
    telling: AbortHandle,
    ended: bool,
}

impl Stream for Reports {
    type Item = Result<WorkerToCoordinatorMsg>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let report = ready!(self.reports.poll_recv(context));
        self.ended |= report.is_none();
        Poll::Ready(report)
    }
}

impl Drop for Reports {
    /// A worker may have nothing more to say while it is told more.
    fn drop(&mut self) {
        if !self.ended {
            self.telling.abort();
            self.connection.cancel_channel(self.request);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No credit has been given.
    New,
    Open,
    Over,
}

/// Rows of a partition. It begins with the first poll, and is cancelled when it is dropped.
#[derive(Debug)]
struct Rows {
    connection: Arc<Connection>,
    request: u64,
    partition: u32,
    frames: UnboundedReceiver<Result<Buffer>>,
    stream: In,
    state: State,
    ready: VecDeque<RecordBatch>,
    /// What has been read, and not given as credit yet.
    read: usize,
}

impl Stream for Rows {
    type Item = Result<RecordBatch>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        if this.state == State::New {
            this.state = State::Open;
            this.connection.credit(this.request, this.partition, this.connection.window);
        }
        loop {
            if let Some(batch) = this.ready.pop_front() {
                return Poll::Ready(Some(Ok(batch)));
            }
            if this.state == State::Over {
                return Poll::Ready(None);
            }
            let decoded = match ready!(this.frames.poll_recv(context)) {
                None => {
                    this.state = State::Over;
                    continue;
                }
                Some(Err(error)) => Err(error),
                Some(Ok(frame)) => this.decode(&frame),
            };
            if let Err(error) = decoded {
                this.end();
                return Poll::Ready(Some(Err(error)));
            }
        }
    }
}

impl Rows {
    fn decode(&mut self, frame: &Buffer) -> Result<()> {
        self.connection.unread.fetch_sub(frame.len(), Ordering::Relaxed);
        self.read += cost(frame.len()) as usize;
        if self.read >= self.connection.window / 4 {
            let read = std::mem::take(&mut self.read);
            self.connection.credit(self.request, self.partition, read);
        }
        let batches = self.stream.frame(frame).map_err(|error| self.connection.error(&error.to_string()))?;
        self.ready.extend(batches);
        Ok(())
    }

    fn end(&mut self) {
        if self.state != State::Over {
            self.state = State::Over;
            self.connection.cancel(self.request, self.partition);
        }
        self.frames.close();
        while let Ok(frame) = self.frames.try_recv() {
            self.connection.unread.fetch_sub(frame.map_or(0, |frame| frame.len()), Ordering::Relaxed);
        }
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        self.end();
    }
}
