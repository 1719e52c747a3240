//! Bodies that are made shorter on their way, and which of them a client takes.

use std::io::{self, Write as _};
use std::pin::Pin;

use axum::http::HeaderMap;
use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use flate2::Compression;
use flate2::write::{GzDecoder, GzEncoder};
use futures_util::{Stream, StreamExt as _, stream};

/// A stream of bytes.
pub(super) type Chunks<E> = Pin<Box<dyn Stream<Item = Result<Vec<u8>, E>> + Send>>;

/// How a body is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Identity,
    Gzip,
}

/// Chooses how to send a body; `None` if the client takes none of ours.
pub(super) fn accepted(headers: &HeaderMap) -> Option<Encoding> {
    let mut offers: Vec<(String, f64)> = Vec::new();
    for value in headers.get_all(ACCEPT_ENCODING) {
        for offer in value.to_str().unwrap_or_default().split(',') {
            let mut parts = offer.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default().to_ascii_lowercase();
            let quality = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok());
            if !name.is_empty() {
                offers.push((name, quality.unwrap_or(1.0)));
            }
        }
    }
    let quality = |name: &str| offers.iter().find(|(offer, _)| offer == name).map(|(_, q)| *q);
    let plain = quality("identity").or(quality("*").filter(|q| *q == 0.0)).unwrap_or(1.0) > 0.0;
    offers.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (name, _) in offers.iter().filter(|(_, quality)| *quality > 0.0) {
        match name.as_str() {
            "gzip" => return Some(Encoding::Gzip),
            "identity" => return Some(Encoding::Identity),
            "*" if plain => return Some(Encoding::Identity),
            "*" => return Some(Encoding::Gzip),
            _ => {}
        }
    }
    plain.then_some(Encoding::Identity)
}

/// Says how a body that came was made shorter; the name of a way that is not known is the error.
pub(super) fn sent(headers: &HeaderMap) -> Result<Encoding, String> {
    let given = headers.get(CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("?"));
    match given.map(|given| given.trim().to_ascii_lowercase()).as_deref() {
        None | Some("" | "identity") => Ok(Encoding::Identity),
        Some("gzip") => Ok(Encoding::Gzip),
        Some(other) => Err(other.to_owned()),
    }
}

/// Makes a body shorter, chunk by chunk.
pub(super) fn pack<E: Send + 'static>(chunks: Chunks<E>) -> Chunks<E> {
    let encoder = GzEncoder::new(Vec::new(), Compression::fast());
    // Writing to memory cannot fail.
    let packed = stream::unfold(Some((chunks, encoder)), |state| async move {
        let (mut chunks, mut encoder) = state?;
        loop {
            match chunks.next().await {
                Some(Ok(chunk)) => {
                    let _ = encoder.write_all(&chunk);
                    let ready = std::mem::take(encoder.get_mut());
                    if !ready.is_empty() {
                        return Some((Ok(ready), Some((chunks, encoder))));
                    }
                }
                Some(Err(error)) => return Some((Err(error), None)),
                None => return Some((Ok(encoder.finish().unwrap_or_default()), None)),
            }
        }
    });
    Box::pin(packed)
}

/// How much of a packed body is unpacked at once: a few bytes may stand for a thousand times as many.
const STEP: usize = 1 << 10;

/// Unpacks a body, step by step.
pub(super) fn unpack(chunks: Chunks<io::Error>) -> Chunks<io::Error> {
    struct State {
        chunks: Chunks<io::Error>,
        decoder: GzDecoder<Vec<u8>>,
        pending: Vec<u8>,
        at: usize,
    }
    let decoder = GzDecoder::new(Vec::new());
    let state = State { chunks, decoder, pending: Vec::new(), at: 0 };
    let unpacked = stream::unfold(Some(state), |state| async move {
        let mut state = state?;
        loop {
            let step = state.pending.len().min(state.at + STEP);
            let part = &state.pending[state.at..step];
            if part.is_empty() {
                match state.chunks.next().await {
                    Some(Ok(chunk)) => (state.pending, state.at) = (chunk, 0),
                    Some(Err(error)) => return Some((Err(error), None)),
                    None => return Some((state.decoder.finish(), None)),
                }
                continue;
            }
            if let Err(error) = state.decoder.write_all(part) {
                return Some((Err(error), None));
            }
            state.at = step;
            let ready = std::mem::take(state.decoder.get_mut());
            if !ready.is_empty() {
                return Some((Ok(ready), Some(state)));
            }
        }
    });
    Box::pin(unpacked)
}

/// Joins what comes in small pieces: whoever watches a small file sees it written once.
pub(super) fn joined(chunks: Chunks<io::Error>) -> Chunks<io::Error> {
    const ENOUGH: usize = 64 << 10;
    let joined = stream::unfold(Some(chunks), |chunks| async move {
        let mut chunks = chunks?;
        let mut all = Vec::new();
        loop {
            match chunks.next().await {
                Some(Ok(mut chunk)) if all.is_empty() && chunk.len() >= ENOUGH => {
                    chunk.shrink_to(ENOUGH);
                    return Some((Ok(chunk), Some(chunks)));
                }
                Some(Ok(chunk)) => all.extend(chunk),
                Some(Err(error)) => return Some((Err(error), None)),
                None if all.is_empty() => return None,
                None => return Some((Ok(all), None)),
            }
            if all.len() >= ENOUGH {
                return Some((Ok(all), Some(chunks)));
            }
        }
    });
    Box::pin(joined)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn chunks(parts: &[&[u8]]) -> Chunks<io::Error> {
        let parts: Vec<_> = parts.iter().map(|part| Ok(part.to_vec())).collect();
        Box::pin(stream::iter(parts))
    }

    async fn all(mut chunks: Chunks<io::Error>) -> io::Result<Vec<u8>> {
        let mut all = Vec::new();
        while let Some(chunk) = chunks.next().await {
            all.extend(chunk?);
        }
        Ok(all)
    }

    #[tokio::test]
    async fn what_is_packed_is_unpacked_however_it_is_cut() {
        let text = b"some text that is long enough ".repeat(10_000);
        let packed = all(pack(chunks(&[&text[..7], &text[7..]]))).await.unwrap();
        assert!(packed.len() < text.len() / 10);
        assert_eq!(all(unpack(chunks(&[&packed]))).await.unwrap(), text);
        let bits: Vec<&[u8]> = packed.chunks(1).collect();
        assert_eq!(all(unpack(chunks(&bits))).await.unwrap(), text);
        assert!(all(unpack(chunks(&[&packed[..packed.len() / 2]]))).await.is_err(), "cut");
        assert!(all(unpack(chunks(&[b"no gzip at all"]))).await.is_err());
    }

    #[tokio::test]
    async fn small_pieces_arrive_as_one() {
        let mut one = joined(chunks(&[b"a", b"", b"b"]));
        assert_eq!(one.next().await.unwrap().unwrap(), b"ab");
        assert!(one.next().await.is_none());
        assert!(joined(chunks(&[])).next().await.is_none());
    }

    #[test]
    fn a_client_gets_what_it_takes() {
        use Encoding::{Gzip, Identity};
        for (offer, wanted) in [
            ("", Some(Identity)),
            ("gzip", Some(Gzip)),
            ("gzip, deflate, br, zstd", Some(Gzip)),
            ("zstd, br", Some(Identity)),
            ("identity", Some(Identity)),
            ("gzip;q=0.5, identity", Some(Identity)),
            ("gzip;q=0", Some(Identity)),
            ("*", Some(Identity)),
            ("identity;q=0, *", Some(Gzip)),
            ("identity;q=0", None),
            ("br, *;q=0", None),
        ] {
            let value = HeaderValue::from_static(offer);
            let headers = [(ACCEPT_ENCODING, value)].into_iter().collect();
            assert_eq!(accepted(&headers), wanted, "{offer}");
        }
    }
}
