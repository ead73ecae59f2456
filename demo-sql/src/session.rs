//! Sessions of the engine: over workers, or in this process alone.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use clap::builder::RangedU64ValueParser;
use datafusion::common::{DataFusionError, TableReference, exec_datafusion_err};
use datafusion::execution::SessionStateBuilder;
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};
use datafusion_distributed::{DistributedConfig, DistributedExt, SessionStateBuilderExt, WorkerResolver};
use http::{HeaderMap, HeaderName, HeaderValue};
use url::Url;

use crate::Transport;
use crate::client::{Resolver, SCHEME};

/// Has an option that the query was planned with, for workers.
const OPTION: HeaderName = HeaderName::from_static("thallus-option");

/// With 3,000 partitions, a query took 7 GB of memory at each of three workers.
const MOST_OF_A_TASK: u64 = 1024;

/// How queries are planned.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Planning {
    /// A folder that all workers see by the same path: NAME.parquet, or a folder NAME of such files, is a table
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<std::path::PathBuf>,
    /// Partitions of a task, at most 1024 [default: processors]
    #[arg(long, value_parser = RangedU64ValueParser::<usize>::new().range(1..=MOST_OF_A_TASK))]
    pub(crate) partitions: Option<usize>,
    /// Bytes of files for each partition of a scan: fewer make more workers take part
    #[arg(long, default_value_t = 1 << 20, value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    pub(crate) scan_bytes: usize,
    /// Options of DataFusion (datafusion.…) and its distributed planner (distributed.…), here and at the workers
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) options: Vec<String>,
}

pub(crate) fn url(transport: Transport, worker: &str) -> Result<Url> {
    let url =
        |scheme| Url::parse(&format!("{scheme}://{worker}")).with_context(|| format!("worker {worker}"));
    // An URL of HTTP has no port if that is 80.
    let ours = url(SCHEME)?;
    ensure!(
        ours.port().is_some() && ours.path().trim_matches('/').is_empty(),
        "worker {worker}: HOST:PORT is wanted"
    );
    match transport {
        Transport::Thallus => Ok(ours),
        Transport::Grpc => url("http"),
    }
}

/// Sets KEY=VALUE.
fn set(config: &mut SessionConfig, option: &str) -> Result<()> {
    let (key, value) = option.split_once('=').with_context(|| format!("{option}: KEY=VALUE is wanted"))?;
    Ok(config.options_mut().set(key, value)?)
}

/// At a worker: sets what the query was planned with. Without, its plan would be run by the engine's own options. Those of the distributed
/// planner come by headers of the engine's.
pub(crate) fn set_options_of(headers: &HeaderMap, config: &mut SessionConfig) -> Result<(), DataFusionError> {
    let options = headers.get_all(OPTION).iter().map(HeaderValue::as_bytes);
    for option in options.filter_map(|option| std::str::from_utf8(option).ok()) {
        if !option.starts_with("distributed.") {
            set(config, option).map_err(|error| exec_datafusion_err!("{error}"))?;
        }
    }
    Ok(())
}

struct Workers(Vec<Url>);

impl WorkerResolver for Workers {
    fn get_urls(&self) -> Result<Vec<Url>, DataFusionError> {
        Ok(self.0.clone())
    }
}

/// Without workers this process does it all.
pub(crate) async fn session(
    workers: Vec<Url>,
    resolver: &Resolver,
    planning: &Planning,
) -> Result<SessionContext> {
    // For SHOW TABLES, and what else says what there is.
    let mut config = SessionConfig::new().with_information_schema(true);
    if let Some(partitions) = planning.partitions {
        config = config.with_target_partitions(partitions);
    }
    // Before options, of which some are the distributed planner's.
    let mut config = config.with_distributed_option_extension(DistributedConfig::default());
    let mut headers = HeaderMap::new();
    for option in &planning.options {
        set(&mut config, option)?;
        let value = HeaderValue::from_bytes(option.as_bytes())
            .with_context(|| format!("{option:?}: control characters"))?;
        headers.append(OPTION, value);
    }
    let builder = SessionStateBuilder::new().with_default_features().with_config(config);
    let state = match workers.is_empty() {
        true => builder.build(),
        false => builder
            .with_distributed_worker_resolver(Workers(workers))
            .with_distributed_channel_resolver(resolver.clone())
            .with_distributed_planner()
            .with_distributed_file_scan_config_bytes_per_partition(planning.scan_bytes)?
            .with_distributed_metrics_collection(false)?
            .with_distributed_compression(None)?
            .with_distributed_passthrough_headers(headers)?
            .build(),
    };
    let context = SessionContext::from(state);
    if let Some(folder) = &planning.data {
        tables(&context, folder).await?;
    }
    Ok(context)
}

async fn tables(context: &SessionContext, folder: &Path) -> Result<()> {
    let folder = folder.canonicalize().with_context(|| folder.display().to_string())?;
    for entry in folder.read_dir()? {
        let path = entry?.path();
        // What is hidden is somebody else's.
        let Some(name) =
            path.file_stem().and_then(|name| name.to_str()).filter(|name| !name.starts_with('.'))
        else {
            continue;
        };
        let url = match path.is_dir() {
            true if has_tables(&path)? => Url::from_directory_path(&path),
            false if is_table(&path) => Url::from_file_path(&path),
            _ => continue,
        };
        let url = url.expect("an absolute path");
        // As a name that is not quoted, whatever is in it.
        let table = TableReference::bare(name.to_lowercase());
        context
            .register_parquet(table, url.as_str(), ParquetReadOptions::default())
            .await
            .with_context(|| path.display().to_string())?;
    }
    Ok(())
}

fn is_table(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "parquet")
}

fn has_tables(folder: &Path) -> Result<bool> {
    for entry in folder.read_dir().with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let path = entry.path();
        // Links may lead round in circles.
        let is_found = match path.is_dir() {
            true => !entry.file_type()?.is_symlink() && has_tables(&path)?,
            false => is_table(&path),
        };
        if is_found {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_has_a_host_and_a_port() {
        for transport in [Transport::Thallus, Transport::Grpc] {
            for worker in ["localhost:80", "127.0.0.1:7001", "[::1]:443", "a.example:65535"] {
                assert!(url(transport, worker).is_ok(), "{worker}");
            }
            for other in ["", "localhost", ":80", "a:65536", "a:1/b", "a b:1", "::1"] {
                assert!(url(transport, other).is_err(), "{other}");
            }
        }
    }
}
