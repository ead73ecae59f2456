//! As much of an HTTP/1.1 server as a scrape needs (RFC 9112): one request for each connection, without a body.
//!
//! A client gets so much time to ask and to take the answer, and so much room; what it sends is looked at by `httparse` alone. The
//! worst that clients can do is to hold all threads, as long as new ones come: who asks in earnest then waits for those before.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Clients that are served at once; more wait.
const THREADS: usize = 32;
/// For a client to ask, and again to take the answer.
const LIMIT: Duration = Duration::from_secs(5);
/// Of request line and headers, in bytes.
const LARGEST_REQUEST: usize = 8 << 10;
const MOST_HEADERS: usize = 64;
/// How long to leave it when the system has no descriptor or no memory for a connection.
const PAUSE: Duration = Duration::from_millis(200);

/// Answers `GET /metrics` with what `metrics` gives, for ever.
pub(super) fn serve(listener: &TcpListener, metrics: &(dyn Fn() -> anyhow::Result<String> + Sync)) {
    let serve = || {
        loop {
            match listener.accept() {
                // What becomes of one client is no concern of the others.
                Ok((stream, _)) => drop(Client::new(stream).serve(metrics)),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(_) => thread::sleep(PAUSE),
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..THREADS {
            // Where there may be no more threads, fewer do.
            if thread::Builder::new().spawn_scoped(scope, serve).is_err() {
                break;
            }
        }
        serve();
    });
}

struct Client {
    stream: TcpStream,
    deadline: Instant,
}

struct Response {
    status: &'static str,
    content_type: &'static str,
    body: String,
    /// The request was HEAD: all but the body.
    head: bool,
}

impl Response {
    fn text(status: &'static str, body: impl Into<String>) -> Self {
        let mut body = body.into();
        body.push('\n');
        Self { status, content_type: "text/plain; charset=utf-8", body, head: false }
    }
}

impl Client {
    fn new(stream: TcpStream) -> Self {
        Self { stream, deadline: Instant::now() + LIMIT }
    }

    fn serve(mut self, metrics: &dyn Fn() -> anyhow::Result<String>) -> io::Result<()> {
        let response = match self.request()? {
            Ok(request) => answer(&request, metrics),
            Err(refusal) => refusal,
        };
        let Response { status, content_type, body, head } = &response;
        let length = body.len();
        let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
        let mut text = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{allow}Connection: close\r\n\r\n"
        );
        if !head {
            text.push_str(body);
        }
        // How long the look took is not the client's fault.
        self.deadline = Instant::now() + LIMIT;
        self.write(text.as_bytes())?;
        self.stream.shutdown(Shutdown::Write)?;
        // With unread bytes a close would be a reset, which may overtake the answer.
        let mut rest = [0; 1024];
        while self.read(&mut rest)? > 0 {}
        Ok(())
    }

    /// Method and target, or what to say to something else.
    fn request(&mut self) -> io::Result<Result<(String, String), Response>> {
        let mut bytes = vec![0; LARGEST_REQUEST];
        let mut length = 0;
        loop {
            let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
            let mut request = httparse::Request::new(&mut headers);
            match request.parse(&bytes[..length]) {
                Ok(httparse::Status::Complete(_)) => {
                    let part = |part: Option<&str>| part.unwrap_or_default().to_owned();
                    return Ok(Ok((part(request.method), part(request.path))));
                }
                Err(error) => {
                    return Ok(Err(Response::text("400 Bad Request", format!("no HTTP request: {error}"))));
                }
                Ok(httparse::Status::Partial) if length == bytes.len() => {
                    let status = "431 Request Header Fields Too Large";
                    return Ok(Err(Response::text(status, "the request is too large")));
                }
                Ok(httparse::Status::Partial) => {}
            }
            match self.read(&mut bytes[length..])? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                count => length += count,
            }
        }
    }

    fn time_left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }

    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        loop {
            self.stream.set_read_timeout(Some(self.time_left()?))?;
            match self.stream.read(bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                outcome => return outcome,
            }
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(self.time_left()?))?;
            match self.stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn answer((method, target): &(String, String), metrics: &dyn Fn() -> anyhow::Result<String>) -> Response {
    let head = method == "HEAD";
    if method != "GET" && !head {
        return Response::text("405 Method Not Allowed", "GET or HEAD");
    }
    let response = match path_of(target) {
        "/metrics" => match metrics() {
            Ok(body) => {
                let content_type = "text/plain; version=0.0.4; charset=utf-8";
                Response { status: "200 OK", content_type, body, head }
            }
            Err(error) => Response::text("500 Internal Server Error", format!("{error:#}")),
        },
        "/" => Response::text("200 OK", "thallus export: the metrics are at /metrics"),
        _ => Response::text("404 Not Found", "the metrics are at /metrics"),
    };
    Response { head, ..response }
}

/// The path of a request's target, which may be a whole URI (RFC 9112, section 3.2.2).
fn path_of(target: &str) -> &str {
    let path = match target.strip_prefix("http://") {
        Some(rest) => rest.find('/').map_or("/", |at| &rest[at..]),
        None => target,
    };
    path.split('?').next().unwrap_or_default()
}
