//! nginx, alone and behind HAProxy, under load while it reloads and is replaced.

use std::fs;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use thallus_tests::harness::{
    Scene, Service, Stats, TOO_SHORT, free_port, group_members, program, report, turn,
};
use thallus_tests::side::Pattern;

/// Sizes of the files that are served.
pub(super) const SIZES: &[usize] = &[0, 1, 100, 5000, 70_000, 1_000_000, 9_000_000];

/// Sends `signal` to a process that runs.
pub(super) fn send(pid: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("a pid")?;
    Ok(kill_process(pid, signal)?)
}

/// A server with workers.
struct Nginx<'a> {
    scene: &'a Scene,
    port: u16,
    /// Speaks TLS and HTTP/2.
    tls: u16,
    /// Has ended, but all of nginx is in its process group.
    shell: Service,
}

impl<'a> Nginx<'a> {
    /// Serves the scene's folder "files": each way to send a file has a place of its own. Connections that ask for nothing
    /// for `idle` are closed.
    fn start(scene: &'a Scene, shimmed: bool, idle: &str) -> Result<Self> {
        let (port, tls, files) = (free_port()?, free_port()?, scene.shared_folder("files")?);
        let mut certificate = scene.plain(program("openssl", "openssl")?);
        certificate.args([
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
        ]);
        certificate.args(["-keyout", "key.pem", "-out", "certificate.pem"]);
        scene.succeed(certificate)?;
        scene.shared_folder("files/put")?;
        for size in SIZES {
            fs::write(files.join(size.to_string()), Pattern::new(*size as u64).take(*size))?;
        }
        let temporary = scene.shared_folder("temporary")?;
        let (files, temporary, folder) =
            (files.display(), temporary.display(), scene.path("").display().to_string());
        let locations = format!(
            "location /slow/ {{ alias {files}/; limit_rate 20m; }}
             location /threads/ {{ alias {files}/; aio threads; }}
             location /buffered/ {{ alias {files}/; sendfile off; tcp_nopush off; output_buffers 2 64k; }}
             location /proxy/ {{ proxy_http_version 1.1; proxy_set_header Connection ''; proxy_pass http://self/; }}
             location /put/ {{ dav_methods PUT; create_full_put_path on; client_body_buffer_size 16k; }}"
        );
        let temporaries: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .iter()
            .map(|kind| format!("{kind}_temp_path {temporary}/{kind};\n"))
            .collect();
        fs::write(
            scene.path("nginx.conf"),
            format!(
                "daemon off; worker_processes 3; pid {folder}pid; error_log {folder}error.log notice;
                 env LD_PRELOAD; env THALLUS_STATS; env THALLUS_UPGRADE_AFTER; env THALLUS_LOG;
                 events {{ worker_connections 512; multi_accept on; }}
                 http {{
                     access_log off; sendfile on; tcp_nopush on; keepalive_requests 200; keepalive_timeout {idle};
                     client_max_body_size 200m; {temporaries}
                     upstream self {{ server 127.0.0.1:{port}; keepalive 4; }}
                     server {{ listen 127.0.0.1:{port}; root {files}; {locations} }}
                     server {{
                         listen 127.0.0.1:{tls} ssl http2; root {files}; {locations}
                         ssl_certificate {folder}certificate.pem; ssl_certificate_key {folder}key.pem;
                     }}
                 }}"
            ),
        )?;
        // One that runs in the foreground lets itself be replaced only when the process that started it has gone.
        let mut shell = scene.command(shimmed, "server", "/bin/sh")?;
        shell
            .args(["-c", "\"$@\" & while [ ! -s pid ]; do sleep 0.01; done", "sh"])
            .arg(program("nginx", "nginx")?);
        shell.arg("-c").arg(scene.path("nginx.conf")).arg("-e").arg(scene.path("error.log"));
        let mut shell = scene.start("nginx", shell)?;
        scene.await_that("nginx starts", || shell.ended().is_ok_and(|status| status.is_some()))?;
        Ok(Self { scene, port, tls, shell })
    }

    fn master(&self) -> Option<u32> {
        fs::read_to_string(self.scene.path("pid")).ok()?.trim().parse().ok()
    }

    fn await_that(&self, what: &str, mut holds: impl FnMut(&Self) -> bool) -> Result<()> {
        let reports = || group_members(self.shell.pid()).into_iter().map(report).collect::<String>();
        self.scene.await_that(what, || holds(self)).with_context(reports)
    }

    /// New workers serve; the old ones end when their connections do.
    fn reload(&self) -> Result<()> {
        send(self.master().context("it runs")?, Signal::HUP)
    }

    /// Another program takes the listener over; the old one ends.
    fn replace(&self) -> Result<()> {
        let old = self.master().context("it runs")?;
        send(old, Signal::USR2)?;
        self.await_that("the new one writes its pid", |nginx| nginx.master().is_some_and(|pid| pid != old))?;
        send(old, Signal::WINCH)?;
        send(old, Signal::QUIT)?;
        self.await_that("the old one ends", |_| !group_members(self.shell.pid()).contains(&old))
    }

    /// Lets it end as soon as nobody is served.
    fn stop(self) -> Result<()> {
        send(self.master().context("it runs")?, Signal::QUIT)?;
        self.await_that("it ends", |_| group_members(self.shell.pid()).is_empty())?;
        let log = fs::read_to_string(self.scene.path("error.log"))?;
        let bad = |line: &&str| ["[alert]", "[crit]", "[emerg]"].iter().any(|level| line.contains(level));
        ensure!(!log.lines().any(|line| bad(&line)), "{log}");
        Ok(())
    }
}

/// http_load.py, until it is stopped.
pub(super) struct Load<'a> {
    scene: &'a Scene,
    service: Service,
    name: String,
}

impl<'a> Load<'a> {
    pub(super) fn start(
        scene: &'a Scene,
        shimmed: bool,
        name: &str,
        port: u16,
        threads: usize,
        places: &str,
    ) -> Result<Self> {
        fs::write(scene.path("http_load.py"), include_str!("http_load.py"))?;
        let mut command = scene.command(shimmed, name, program("python3", "python3")?)?;
        command.arg("-B").arg(scene.path("http_load.py")).arg(port.to_string()).arg(scene.path("files"));
        command.args([&threads.to_string(), places]);
        // Two may run at the same time, and count together.
        let name = format!("{name}-{port}");
        Ok(Self { scene, service: scene.start(&name, command)?, name })
    }

    /// Waits until `more` requests have been answered.
    pub(super) fn go_on(&mut self, more: usize) -> Result<()> {
        let log = self.scene.path(&format!("{}.log", self.name));
        let count = || {
            fs::read_to_string(&log)
                .unwrap_or_default()
                .lines()
                .last()
                .and_then(|line| line.parse().ok())
                .unwrap_or(0)
        };
        let before: usize = count();
        self.service
            .await_ready(|| count() >= before + more)
            .with_context(|| fs::read_to_string(self.scene.path("error.log")).unwrap_or_default())
    }

    pub(super) fn stop(self) -> Result<()> {
        let log = self.scene.path(&format!("{}.log", self.name));
        let status = self.service.stop(Signal::TERM)?;
        let text = fs::read_to_string(log)?;
        ensure!(status.success() && text.contains("all right"), "{status}\n{text}");
        Ok(())
    }
}

const PLACES: &str = ",slow,threads,buffered,proxy,put";

/// Where both sides have the library, most connections are worth an upgrade.
fn most_upgraded(stats: &Stats) {
    assert!(stats.over_shared_memory() * 2 > stats.connections(), "{stats:?}");
    let reasons = [TOO_SHORT, &["shutdown-before-upgrade"]].concat();
    assert!(stats.not_upgraded.keys().all(|reason| reasons.contains(&reason.as_str())), "{stats:?}");
}

#[test]
fn nginx_reloads_and_is_replaced_under_load() -> Result<()> {
    let _turn = turn();
    for (server, client) in [(true, true), (true, false), (false, true)] {
        let scene = Scene::new()?;
        let nginx = Nginx::start(&scene, server, "1s")?;

        let mut load = Load::start(&scene, client, "client", nginx.port, 8, PLACES)?;
        load.go_on(200)?;
        for _ in 0..2 {
            nginx.reload()?;
            load.go_on(200)?;
        }
        nginx.replace()?;
        load.go_on(200)?;
        load.stop()?;
        if server && client {
            // Those of the new program alone: it has inherited its listener.
            let mut load = Load::start(&scene, true, "later", nginx.port, 4, ",put")?;
            load.go_on(300)?;
            load.stop()?;
            most_upgraded(&scene.stats("later")?);
        }
        nginx.stop()?;
        let (served, asked) = (scene.stats("server")?, scene.stats("client")?);
        if server && client {
            most_upgraded(&served);
            most_upgraded(&asked);
            assert!(asked.ring_bytes_received > asked.tcp_bytes_received, "{asked:?}");
        } else {
            // The server's own upstreams, of which it has both ends.
            assert_eq!(asked.over_shared_memory(), 0, "{asked:?}");
            assert_eq!(served.over_shared_memory() > 0, server, "{served:?}");
        }
    }
    Ok(())
}

/// HAProxy with threads, and a master that starts new workers.
struct Haproxy {
    service: Service,
    /// Understands HTTP.
    http: u16,
    /// Passes bytes on.
    raw: u16,
}

impl Haproxy {
    fn start(scene: &Scene, shimmed: bool, upstream: u16) -> Result<Self> {
        let (http, raw) = (free_port()?, free_port()?);
        fs::write(
            scene.path("haproxy.cfg"),
            format!(
                "global\n nbthread 2\n stats socket {} mode 600 level admin expose-fd listeners
                 defaults\n timeout connect 5s\n timeout client 30s\n timeout server 30s\n timeout http-keep-alive 1s
                 listen http\n mode http\n bind 127.0.0.1:{http}\n http-reuse always
                  server a 127.0.0.1:{upstream} check inter 200ms\n server b 127.0.0.1:{upstream}
                 listen raw\n mode tcp\n bind 127.0.0.1:{raw}\n option splice-auto
                  server a 127.0.0.1:{upstream}\n",
                scene.path("haproxy.sock").display()
            ),
        )?;
        let mut command = scene.command(shimmed, "proxy", program("haproxy", "haproxy")?)?;
        command.arg("-W").arg("-f").arg(scene.path("haproxy.cfg"));
        let mut service = scene.start("haproxy", command)?;
        service.await_port(raw)?;
        Ok(Self { service, http, raw })
    }
}

#[test]
fn haproxy_passes_on_what_nginx_serves() -> Result<()> {
    let _turn = turn();
    for all in [true, false] {
        let scene = Scene::new()?;
        // Longer than HAProxy keeps them: to a request on one that is being closed it answers 502, over TCP as well.
        let nginx = Nginx::start(&scene, all, "75s")?;
        let proxy = Haproxy::start(&scene, true, nginx.port)?;
        let mut by_http = Load::start(&scene, all, "client", proxy.http, 4, ",proxy,put")?;
        let mut by_bytes = Load::start(&scene, all, "client", proxy.raw, 4, ",threads,put")?;
        for _ in 0..2 {
            by_http.go_on(150)?;
            by_bytes.go_on(150)?;
            send(proxy.service.pid(), Signal::USR2)?;
        }
        by_http.go_on(150)?;
        by_http.stop()?;
        by_bytes.stop()?;
        proxy.service.stop(Signal::TERM)?;
        nginx.stop()?;
        let [served, passed, asked] = [scene.stats("server")?, scene.stats("proxy")?, scene.stats("client")?];
        for stats in [served, passed, asked] {
            assert_eq!(stats.over_shared_memory() > 10, all, "{stats:?}");
        }
    }
    Ok(())
}

/// Downloads all files at once, and puts one, by curl.
fn by_tls(server: bool, client: bool) -> Result<[Stats; 2]> {
    let scene = Scene::new()?;
    let nginx = Nginx::start(&scene, server, "1s")?;
    let curl = |arguments: &[&str]| -> Result<String> {
        let mut command = scene.command(client, "client", program("curl", "curl")?)?;
        command.args(["-sSk", "--fail", "--http2"]).args(arguments);
        scene.succeed(command)
    };
    let names: Vec<String> = SIZES.iter().map(ToString::to_string).collect();
    let url = |path: &str| format!("https://127.0.0.1:{}/{path}", nginx.tls);
    curl(&["--parallel", "-o", "got-#1", &url(&format!("{{{}}}", names.join(",")))])?;
    curl(&["-T", "files/9000000", &url("put/9000000")])?;
    for name in &names {
        ensure!(
            fs::read(scene.path(&format!("got-{name}")))? == fs::read(scene.path("files").join(name))?,
            "{name} differs"
        );
    }
    ensure!(
        fs::read(scene.path("files/put/9000000"))? == fs::read(scene.path("files/9000000"))?,
        "what was put differs"
    );
    nginx.stop()?;
    Ok([scene.stats("server")?, scene.stats("client")?])
}

#[test]
fn nginx_speaks_tls_and_http2() -> Result<()> {
    let _turn = turn();
    by_tls(false, false)?;
    for (server, client) in [(true, true), (true, false), (false, true)] {
        for stats in by_tls(server, client)? {
            assert_eq!(stats.over_shared_memory() > 0, server && client, "{stats:?}");
        }
    }
    Ok(())
}
