//! `warren port`: a server inside a sandbox, at an address of this host or on stdin and stdout.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::task::TaskTracker;

use crate::args::ClientArgs;
use crate::client::{Client, Dialer, Tunnel};
use crate::commands;
use crate::failure::Failure;
use crate::output::{self, say};
use crate::streams::Stream;

/// How much is read at once.
const CHUNK: usize = 32 << 10;
/// How long to wait when this host has no descriptor left for a connection.
const BREATHER: Duration = Duration::from_millis(100);

/// Which port, and where it is to be found.
#[derive(Debug, Args)]
pub(crate) struct PortArgs {
    #[command(flatten)]
    pub(crate) client: ClientArgs,
    /// Where to listen: an address and a port, or a port of 127.0.0.1; a free one if absent.
    #[arg(long, value_name = "ADDR:PORT", value_parser = listen, conflicts_with = "stdio")]
    listen: Option<SocketAddr>,
    /// Connect once, and join the connection to stdin and stdout.
    #[arg(long)]
    stdio: bool,
    /// Name or id of the sandbox, or the beginning of one.
    sandbox: String,
    /// The port inside.
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
}

fn listen(text: &str) -> Result<SocketAddr, String> {
    match (text.parse::<u16>(), text.parse()) {
        (Ok(port), _) => Ok((Ipv4Addr::LOCALHOST, port).into()),
        (_, Ok(address)) => Ok(address),
        _ => Err("write an address and a port, as in 127.0.0.1:8080, or a port".to_owned()),
    }
}

/// What is printed for programs.
#[derive(Serialize)]
struct Listening {
    sandbox_id: String,
    port: u16,
    address: SocketAddr,
    url: String,
}

/// `warren port`.
pub(crate) fn port(args: &PortArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = commands::find(&client, &args.sandbox)?.id;
    let dialer = client.dialer(format!("/v1/sandboxes/{id}/ports/{}", args.port));
    if args.stdio {
        return client.block_on(join_streams(&dialer));
    }
    client.block_on(serve(args, id, dialer))
}

async fn serve(args: &PortArgs, sandbox_id: String, dialer: Dialer) -> Result<u8, Failure> {
    let wanted = args.listen.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, 0).into());
    let failed = |error| Failure::system(&format!("cannot listen on {wanted}"), &error);
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    let listener = TcpListener::bind(wanted).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    if !address.ip().is_loopback() {
        say(&format!("warning: whoever reaches {address} reaches the sandbox's port"));
    }
    let printed = if args.client.json {
        let url = format!("http://{address}/");
        output::print_json(&Listening { sandbox_id, port: args.port, address, url })
    } else {
        output::print(format!("{address}\n").as_bytes())
    };
    printed.map_err(|error| Failure::system("cannot write to stdout", &error))?;

    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // What is open is closed with us.
            _ = terminate.recv() => return Ok(0),
            _ = interrupt.recv() => return Ok(0),
        };
        match accepted {
            Ok((stream, _)) => drop(tasks.spawn(carry(stream, dialer.clone()))),
            Err(error) => {
                say(&format!("warning: cannot take a connection: {error}"));
                tokio::time::sleep(BREATHER).await;
            }
        }
    }
}

/// Carries one connection to the port inside.
async fn carry(mut stream: TcpStream, dialer: Dialer) {
    let _ = stream.set_nodelay(true);
    match dialer.dial().await {
        Ok(mut tunnel) => {
            let copied =
                tokio::io::copy_bidirectional_with_sizes(&mut stream, &mut tunnel, CHUNK, CHUNK);
            // However it ends, both are closed then, and each end sees that.
            let _ = copied.await;
        }
        Err(failure) => {
            // Closed hard, as by a host on which nothing listens.
            let _ = rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO));
            failure.report(false);
        }
    }
}

/// Joins the port inside to stdin and stdout, until the server ends the connection.
async fn join_streams(dialer: &Dialer) -> Result<u8, Failure> {
    let (mut from, mut to) = tokio::io::split(dialer.dial().await?);
    let stdin = Stream::new(std::io::stdin(), Interest::READABLE);
    let stdout = Stream::new(std::io::stdout(), Interest::WRITABLE);
    let inward = async {
        copy_in(&stdin, &mut to).await;
        // The end of stdin is the end of what we say; the server may still have something to say.
        let _ = to.shutdown().await;
    };
    let outward = async {
        let mut buffer = vec![0; CHUNK];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            stdout.write_all(&buffer[..length]).await?;
        }
        Ok(())
    };
    tokio::pin!(inward, outward);
    let written: std::io::Result<()> = tokio::select! {
        written = &mut outward => written,
        () = &mut inward => outward.await,
    };
    written.map(|()| 0).map_err(|error| Failure::system("cannot write to stdout", &error))
}

async fn copy_in(stdin: &Stream<std::io::Stdin>, to: &mut tokio::io::WriteHalf<Tunnel>) {
    let mut buffer = vec![0; CHUNK];
    while let Ok(length @ 1..) = stdin.read(&mut buffer).await {
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_to_listen_on_is_a_port_or_both() {
        for (text, address) in [
            ("8080", Some("127.0.0.1:8080")),
            ("0", Some("127.0.0.1:0")),
            ("0.0.0.0:1", Some("0.0.0.0:1")),
            ("[::1]:1", Some("[::1]:1")),
            ("65536", None),
            ("127.0.0.1", None),
            ("name:80", None),
            ("", None),
        ] {
            let parsed = listen(text).ok().map(|address| address.to_string());
            assert_eq!(parsed.as_deref(), address, "{text}");
        }
    }
}
