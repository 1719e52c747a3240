//! Doors for `fuzz/` to what parses what clients send.

use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request, Uri};

use crate::rest::wire::{AttachBody, CreateSandboxBody, ExecBody};
use crate::{e2b, extract, keys, principal, rest};

/// Reads frames and messages of E2B's clients.
pub fn connect(data: &[u8]) {
    e2b::fuzz(data);
}

/// Reads what the API is asked.
pub fn requests(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(bytes);
    match if *kind < 128 { kind % 8 } else { 8 } {
        0 => {
            if let Ok(body) = serde_json::from_slice::<CreateSandboxBody>(bytes)
                && let Ok(spec) = body.spec()
            {
                let _ = spec.validate();
            }
        }
        1 => {
            if let Ok(body) = serde_json::from_slice::<ExecBody>(bytes) {
                let _ = body.command();
            }
        }
        2 => {
            let _ = serde_json::from_slice::<AttachBody>(bytes);
            let _ = serde_json::from_slice::<rest::execs::StartExecBody>(bytes);
            let _ = serde_json::from_slice::<rest::shells::ShellRunBody>(bytes);
        }
        3 => {
            if let Ok(id) = extract::plain(text.clone().into_owned()) {
                // An id is part of paths of the host.
                assert!(!id.as_str().contains(['/', '\0']) && !id.as_str().starts_with('.'));
            }
        }
        4 => {
            let own = rest::ports::own_part(&text);
            assert!(text.starts_with(own));
        }
        5 => principal::fuzz(&text),
        6 => keys::fuzz(bytes),
        8 => e2b::control::fuzz(bytes),
        _ => {
            let mut lines = text.lines();
            let Some(Ok(uri)) = lines.next().map(str::parse::<Uri>) else { return };
            let mut headers = HeaderMap::new();
            for line in lines.take(16) {
                let Some((name, value)) = line.split_once(':') else { continue };
                if let (Ok(name), Ok(value)) =
                    (name.parse::<HeaderName>(), HeaderValue::from_str(value.trim()))
                {
                    headers.append(name, value);
                }
            }
            let mut request = Request::new(Body::empty());
            *request.uri_mut() = uri;
            *request.headers_mut() = headers;
            e2b::fuzz_routing(request);
        }
    }
}
