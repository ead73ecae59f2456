//! The engine's messages, as protobuf. Metrics of plans are not sent: the sessions here collect none.

use datafusion::common::{DataFusionError, Result, exec_datafusion_err};
use datafusion_distributed::{
    CoordinatorToWorkerMsg, ExecuteTaskRequest, LoadInfo, ProducerHeadSpec, SetPlanRequest, TaskKey,
    WorkUnitBatch, WorkUnitFeedDeclaration, WorkUnitMsg, WorkerToCoordinatorMsg,
};
use http::{HeaderMap, HeaderName, HeaderValue};
use prost::{Message, Oneof};
use url::Url;
use uuid::Uuid;

use crate::wire::{LARGEST_MESSAGE, MOST_PARTITIONS};

#[derive(Clone, PartialEq, Message)]
struct Headers {
    #[prost(message, repeated, tag = "1")]
    headers: Vec<Header>,
}

#[derive(Clone, PartialEq, Message)]
struct Header {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Key {
    #[prost(bytes = "vec", tag = "1")]
    query: Vec<u8>,
    #[prost(uint64, tag = "2")]
    stage: u64,
    #[prost(uint64, tag = "3")]
    task: u64,
}

#[derive(Clone, PartialEq, Message)]
struct ToWorker {
    #[prost(oneof = "ToWorkerKind", tags = "1, 2, 3")]
    kind: Option<ToWorkerKind>,
}

#[derive(Clone, PartialEq, Oneof)]
enum ToWorkerKind {
    #[prost(message, tag = "1")]
    Plan(Plan),
    #[prost(message, tag = "2")]
    Units(Units),
    #[prost(bool, tag = "3")]
    UnitsEnd(bool),
}

#[derive(Clone, PartialEq, Message)]
struct Plan {
    #[prost(message, optional, tag = "1")]
    key: Option<Key>,
    #[prost(uint64, tag = "2")]
    tasks: u64,
    #[prost(bytes = "vec", tag = "3")]
    plan: Vec<u8>,
    #[prost(message, repeated, tag = "4")]
    feeds: Vec<Feed>,
    #[prost(string, tag = "5")]
    worker: String,
    #[prost(uint64, tag = "6")]
    began: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Feed {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(uint64, tag = "2")]
    partitions: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Units {
    #[prost(message, repeated, tag = "1")]
    units: Vec<Unit>,
}

#[derive(Clone, PartialEq, Message)]
struct Unit {
    #[prost(bytes = "vec", tag = "1")]
    id: Vec<u8>,
    #[prost(uint64, tag = "2")]
    partition: u64,
    #[prost(bytes = "vec", tag = "3")]
    body: Vec<u8>,
    /// Created, sent, received, processed.
    #[prost(uint64, repeated, tag = "4")]
    times: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct ToCoordinator {
    /// None: no more of them.
    #[prost(message, optional, tag = "1")]
    load: Option<Load>,
}

#[derive(Clone, PartialEq, Message)]
struct Load {
    #[prost(uint64, tag = "1")]
    partition: u64,
    #[prost(uint64, tag = "2")]
    rows: u64,
    #[prost(uint64, repeated, tag = "3")]
    bytes: Vec<u64>,
    #[prost(float, repeated, tag = "4")]
    distinct: Vec<f32>,
    #[prost(float, repeated, tag = "5")]
    nulls: Vec<f32>,
    #[prost(uint64, tag = "6")]
    pulled: u64,
    #[prost(bool, tag = "7")]
    ended: bool,
}

#[derive(Clone, PartialEq, Message)]
struct Execute {
    #[prost(message, optional, tag = "1")]
    key: Option<Key>,
    #[prost(uint64, tag = "2")]
    start: u64,
    #[prost(uint64, tag = "3")]
    end: u64,
    #[prost(oneof = "HeadKind", tags = "4, 5")]
    head: Option<HeadKind>,
}

#[derive(Clone, PartialEq, Oneof)]
enum HeadKind {
    #[prost(uint64, tag = "4")]
    Broadcast(u64),
    #[prost(bytes = "vec", tag = "5")]
    Repartition(Vec<u8>),
}

pub(crate) fn headers_to_bytes(headers: &HeaderMap) -> Vec<u8> {
    let header = |(name, value): (&HeaderName, &HeaderValue)| Header {
        name: name.to_string(),
        value: value.as_bytes().into(),
    };
    Headers { headers: headers.iter().map(header).collect() }.encode_to_vec()
}

pub(crate) fn headers_from_bytes(bytes: &[u8]) -> Result<HeaderMap> {
    let headers = Headers::decode(bytes).map_err(|error| malformed("headers", &error))?;
    let mut map = HeaderMap::new();
    for Header { name, value } in headers.headers {
        let name: HeaderName = name.parse().map_err(|error| malformed("a header's name", &error))?;
        let value = HeaderValue::from_bytes(&value).map_err(|error| malformed("a header", &error))?;
        map.try_append(name, value).map_err(|error| malformed("headers", &error))?;
    }
    Ok(map)
}

/// # Errors
///
/// More bytes than a frame may have.
pub(crate) fn to_worker(message: CoordinatorToWorkerMsg) -> Result<Vec<u8>> {
    let kind = match message {
        CoordinatorToWorkerMsg::SetPlanRequest(request) => ToWorkerKind::Plan(Plan {
            key: Some(Key::of(request.task_key)),
            tasks: request.task_count as u64,
            plan: request.plan_proto,
            feeds: request
                .work_unit_feed_declarations
                .into_iter()
                .map(|feed| Feed { id: feed.id.into_bytes().into(), partitions: feed.partitions as u64 })
                .collect(),
            worker: request.target_worker_url.into(),
            began: request.query_start_time_ns as u64,
        }),
        CoordinatorToWorkerMsg::WorkUnitBatch(batch) => {
            ToWorkerKind::Units(Units { units: batch.batch.into_iter().map(Unit::of).collect() })
        }
        CoordinatorToWorkerMsg::WorkUnitEos => ToWorkerKind::UnitsEnd(true),
    };
    let bytes = ToWorker { kind: Some(kind) }.encode_to_vec();
    match bytes.len() {
        ..=LARGEST_MESSAGE => Ok(bytes),
        length => Err(exec_datafusion_err!("a plan of {length} bytes; {LARGEST_MESSAGE} are possible")),
    }
}

pub(crate) fn at_worker(bytes: &[u8]) -> Result<CoordinatorToWorkerMsg> {
    let message = ToWorker::decode(bytes).map_err(|error| malformed("a message to the worker", &error))?;
    Ok(match message.kind.ok_or_else(|| missing("a message to the worker"))? {
        ToWorkerKind::Plan(plan) => CoordinatorToWorkerMsg::SetPlanRequest(SetPlanRequest {
            task_key: key(plan.key)?,
            task_count: size(plan.tasks)?,
            plan_proto: plan.plan,
            work_unit_feed_declarations: plan
                .feeds
                .into_iter()
                .map(|Feed { id, partitions }| {
                    Ok(WorkUnitFeedDeclaration { id: uuid(&id)?, partitions: few(partitions)? })
                })
                .collect::<Result<_>>()?,
            target_worker_url: Url::parse(&plan.worker)
                .map_err(|error| malformed("a worker's URL", &error))?,
            query_start_time_ns: size(plan.began)?,
        }),
        ToWorkerKind::Units(units) => CoordinatorToWorkerMsg::WorkUnitBatch(WorkUnitBatch {
            batch: units.units.into_iter().map(Unit::into_message).collect::<Result<_>>()?,
        }),
        ToWorkerKind::UnitsEnd(_) => CoordinatorToWorkerMsg::WorkUnitEos,
    })
}

/// None for what is not sent.
pub(crate) fn to_coordinator(message: WorkerToCoordinatorMsg) -> Option<Vec<u8>> {
    let load = match message {
        WorkerToCoordinatorMsg::TaskMetrics(_) => return None,
        WorkerToCoordinatorMsg::LoadInfoEos => None,
        WorkerToCoordinatorMsg::LoadInfo(load) => Some(Load {
            partition: load.partition as u64,
            rows: load.rows_ready as u64,
            bytes: load.per_column_bytes_ready.into_iter().map(|bytes| bytes as u64).collect(),
            distinct: load.per_column_ndv_percentage,
            nulls: load.per_column_null_percentage,
            pulled: load.rows_pulled_from_leaf as u64,
            ended: load.reached_eos,
        }),
    };
    Some(ToCoordinator { load }.encode_to_vec())
}

pub(crate) fn at_coordinator(bytes: &[u8]) -> Result<WorkerToCoordinatorMsg> {
    let message = ToCoordinator::decode(bytes).map_err(|error| malformed("a worker's report", &error))?;
    let Some(load) = message.load else { return Ok(WorkerToCoordinatorMsg::LoadInfoEos) };
    Ok(WorkerToCoordinatorMsg::LoadInfo(LoadInfo {
        partition: size(load.partition)?,
        rows_ready: size(load.rows)?,
        per_column_bytes_ready: load.bytes.into_iter().map(size).collect::<Result<_>>()?,
        per_column_ndv_percentage: load.distinct,
        per_column_null_percentage: load.nulls,
        rows_pulled_from_leaf: size(load.pulled)?,
        reached_eos: load.ended,
    }))
}

pub(crate) fn execute_to_bytes(request: ExecuteTaskRequest) -> Vec<u8> {
    let head = match request.producer_head_spec {
        ProducerHeadSpec::None => None,
        ProducerHeadSpec::BroadcastExec { output_partitions } => {
            Some(HeadKind::Broadcast(output_partitions as u64))
        }
        ProducerHeadSpec::RepartitionExec { partitioning } => Some(HeadKind::Repartition(partitioning)),
    };
    let (start, end) = (request.target_partition_start as u64, request.target_partition_end as u64);
    Execute { key: Some(Key::of(request.task_key)), start, end, head }.encode_to_vec()
}

/// # Errors
///
/// A range that ends before it starts, or is too long, among others: the engine allocates as much.
pub(crate) fn execute_from_bytes(bytes: &[u8]) -> Result<ExecuteTaskRequest> {
    let request = Execute::decode(bytes).map_err(|error| malformed("a request", &error))?;
    match request.end.checked_sub(request.start) {
        Some(1..=MOST_PARTITIONS) => {}
        _ => return Err(exec_datafusion_err!("malformed: partitions {} to {}", request.start, request.end)),
    }
    Ok(ExecuteTaskRequest {
        task_key: key(request.key)?,
        target_partition_start: size(request.start)?,
        target_partition_end: size(request.end)?,
        producer_head_spec: match request.head {
            None => ProducerHeadSpec::None,
            Some(HeadKind::Broadcast(partitions)) => {
                ProducerHeadSpec::BroadcastExec { output_partitions: few(partitions)? }
            }
            Some(HeadKind::Repartition(partitioning)) => ProducerHeadSpec::RepartitionExec { partitioning },
        },
    })
}

impl Key {
    fn of(key: TaskKey) -> Self {
        let (stage, task) = (key.stage_id as u64, key.task_number as u64);
        Self { query: key.query_id.into_bytes().into(), stage, task }
    }
}

impl Unit {
    fn of(unit: WorkUnitMsg) -> Self {
        let times = [
            unit.created_timestamp_unix_nanos,
            unit.sent_timestamp_unix_nanos,
            unit.received_timestamp_unix_nanos,
            unit.processed_timestamp_unix_nanos,
        ];
        Self {
            id: unit.id.into_bytes().into(),
            partition: unit.partition as u64,
            body: unit.body,
            times: times.into_iter().map(|time| time as u64).collect(),
        }
    }

    fn into_message(self) -> Result<WorkUnitMsg> {
        let time = |at: usize| size(self.times.get(at).copied().unwrap_or_default());
        Ok(WorkUnitMsg {
            id: uuid(&self.id)?,
            partition: size(self.partition)?,
            created_timestamp_unix_nanos: time(0)?,
            sent_timestamp_unix_nanos: time(1)?,
            received_timestamp_unix_nanos: time(2)?,
            processed_timestamp_unix_nanos: time(3)?,
            body: self.body,
        })
    }
}

fn key(key: Option<Key>) -> Result<TaskKey> {
    let Key { query, stage, task } = key.ok_or_else(|| missing("a task's key"))?;
    Ok(TaskKey { query_id: uuid(&query)?, stage_id: size(stage)?, task_number: size(task)? })
}

fn uuid(bytes: &[u8]) -> Result<Uuid> {
    Uuid::from_slice(bytes).map_err(|error| malformed("an id", &error))
}

fn size(number: u64) -> Result<usize> {
    usize::try_from(number).map_err(|error| malformed("a number", &error))
}

/// A count of partitions, for which the engine allocates.
fn few(number: u64) -> Result<usize> {
    match number {
        ..=MOST_PARTITIONS => size(number),
        _ => Err(exec_datafusion_err!("malformed: {number} partitions")),
    }
}

fn malformed(what: &str, error: &dyn std::error::Error) -> DataFusionError {
    exec_datafusion_err!("malformed: {what}: {error}")
}

fn missing(what: &str) -> DataFusionError {
    exec_datafusion_err!("malformed: {what} has nothing in it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_that_make_no_sense_are_refused() {
        for (start, end, taken) in [
            (0, 1, true),
            (7, 7, false),
            (8, 7, false),
            (0, u64::MAX, false),
            (5, 65_541, true),
            (5, 65_542, false),
        ] {
            let key = Some(Key { query: vec![0; 16], stage: 1, task: 0 });
            let bytes = Execute { key, start, end, head: None }.encode_to_vec();
            assert_eq!(execute_from_bytes(&bytes).is_ok(), taken, "{start}, {end}");
        }
    }

    #[test]
    fn headers_come_as_they_were() {
        let mut headers = HeaderMap::new();
        headers.append("a", HeaderValue::from_static("1"));
        headers.append("a", HeaderValue::from_bytes(&[0x80, 0xff]).unwrap());
        headers.append("b", HeaderValue::from_static(""));
        assert_eq!(headers_from_bytes(&headers_to_bytes(&headers)).unwrap(), headers);
        assert!(headers_from_bytes(&[7]).is_err());
    }
}
