//! The daemon as the benchmark uses it: plain HTTP/1.1 on one connection that is kept open.
//!
//! Blocking and by hand, so that what is measured is the daemon and not a client library.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// One connection to a daemon.
pub(crate) struct Client {
    stream: Box<dyn Stream>,
    head: String,
    buffer: Vec<u8>,
}

/// A sandbox of the daemon, with the session on it.
pub(crate) struct Acquired {
    pub(crate) sandbox: String,
    pub(crate) session: String,
}

impl Client {
    /// Connects to a unix socket.
    pub(crate) fn unix(path: &str) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| format!("connect to {path}"))?;
        let head = "Host: localhost\r\nContent-Type: application/json\r\n".to_owned();
        Ok(Self { stream: Box::new(stream), head, buffer: Vec::new() })
    }

    /// Connects to an address, as the owner of a key.
    pub(crate) fn tcp(address: &str, key: &str) -> Result<Self> {
        let stream =
            TcpStream::connect(address).with_context(|| format!("connect to {address}"))?;
        stream.set_nodelay(true)?;
        let head = format!(
            "Host: {address}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        );
        Ok(Self { stream: Box::new(stream), head, buffer: Vec::new() })
    }

    /// Has a sandbox made, or takes one from the pool.
    pub(crate) fn create(&mut self, pool: bool) -> Result<Acquired> {
        let body = json!({ "select": { "use_pool": pool, "require_fresh": true } });
        let answer = self.ask("POST", "/v1/sandboxes", &body)?;
        let text = |value: &Value| value["id"].as_str().unwrap_or_default().to_owned();
        Ok(Acquired { sandbox: text(&answer["sandbox"]), session: text(&answer["session"]) })
    }

    /// Runs a command to its end and returns how many bytes it wrote.
    pub(crate) fn exec(&mut self, sandbox: &str, program: &str, args: &[&str]) -> Result<usize> {
        let body = json!({ "program": program, "args": args });
        let answer = self.ask("POST", &format!("/v1/sandboxes/{sandbox}/exec"), &body)?;
        match answer["exit_code"].as_i64() {
            Some(0) => Ok(answer["stdout"].as_str().map_or(0, str::len)),
            _ => bail!("the command failed: {answer}"),
        }
    }

    /// Runs a command in a sandbox of its own, by one request.
    pub(crate) fn run(&mut self, program: &str) -> Result<()> {
        let answer = self.ask("POST", "/v1/run", &json!({ "command": { "program": program } }))?;
        match answer["exit_code"].as_i64() {
            Some(0) => Ok(()),
            _ => bail!("the command failed: {answer}"),
        }
    }

    /// Has a sandbox made that may write any amount.
    pub(crate) fn create_chatty(&mut self) -> Result<String> {
        let body =
            json!({ "limits": { "max_output_bytes": null }, "select": { "require_fresh": true } });
        let answer = self.ask("POST", "/v1/sandboxes", &body)?;
        Ok(answer["sandbox"]["id"].as_str().unwrap_or_default().to_owned())
    }

    /// Runs a command, follows its log to its end, and returns how many bytes came.
    pub(crate) fn follow(&mut self, sandbox: &str, program: &str, args: &[&str]) -> Result<u64> {
        let body = json!({ "command": { "program": program, "args": args } });
        let path = format!("/v1/sandboxes/{sandbox}/execs");
        let answer = self.ask("POST", &path, &body)?;
        let exec = answer["id"].as_str().unwrap_or_default();
        let request = format!("GET {path}/{exec}/log?follow=true HTTP/1.1\r\n{}\r\n", self.head);
        self.stream.write_all(request.as_bytes())?;
        let mut from = BufReader::with_capacity(1 << 18, &mut self.stream);
        let mut line = String::new();
        while line != "\r\n" {
            line.clear();
            from.read_line(&mut line)?;
        }
        let mut total = 0;
        loop {
            line.clear();
            from.read_line(&mut line)?;
            let size = u64::from_str_radix(line.trim(), 16).context("the size of a chunk")?;
            std::io::copy(&mut (&mut from).take(size), &mut std::io::sink())?;
            from.read_line(&mut line)?;
            if size == 0 {
                return Ok(total);
            }
            total += size;
        }
    }

    /// Ends a sandbox.
    pub(crate) fn destroy(&mut self, sandbox: &str) -> Result<()> {
        self.ask("DELETE", &format!("/v1/sandboxes/{sandbox}"), &Value::Null).map(|_| ())
    }

    /// Suspends or resumes a session.
    pub(crate) fn change(&mut self, session: &str, to: &str) -> Result<()> {
        self.ask("POST", &format!("/v1/sessions/{session}/{to}"), &Value::Null).map(|_| ())
    }

    /// Returns how many sandboxes are warm.
    pub(crate) fn warm(&mut self) -> Result<u64> {
        let answer = self.ask("GET", "/v1/stats", &Value::Null)?;
        Ok(answer["manager"]["pool_size"].as_u64().unwrap_or_default())
    }

    fn ask(&mut self, method: &str, path: &str, body: &Value) -> Result<Value> {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (head, length) = (&self.head, body.len());
        let request =
            format!("{method} {path} HTTP/1.1\r\n{head}Content-Length: {length}\r\n\r\n{body}");
        self.stream.write_all(request.as_bytes())?;
        self.buffer.clear();
        let mut chunk = [0; 16384];
        let (end, length) = loop {
            let read = self.stream.read(&mut chunk)?;
            if read == 0 {
                bail!("the daemon hung up");
            }
            self.buffer.extend_from_slice(&chunk[..read]);
            if let Some(end) = self.buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                let head = String::from_utf8_lossy(&self.buffer[..end]).to_ascii_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
                break (end + 4, length.map_or(Ok(0), str::parse::<usize>)?);
            }
        };
        while self.buffer.len() < end + length {
            let read = self.stream.read(&mut chunk)?;
            if read == 0 {
                bail!("the daemon hung up");
            }
            self.buffer.extend_from_slice(&chunk[..read]);
        }
        let body = &self.buffer[end..];
        if self.buffer.get(9) != Some(&b'2') {
            bail!("{method} {path}: {}", String::from_utf8_lossy(body));
        }
        Ok(if body.is_empty() { Value::Null } else { serde_json::from_slice(body)? })
    }
}
