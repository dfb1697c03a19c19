//! A body that comes in pieces: decompressed as it comes, and not waited for for ever. Knows no file.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use futures_util::StreamExt;
use futures_util::stream::{self, Stream};
use http::HeaderMap;
use http::header::CONTENT_ENCODING;

use crate::error::Error;

/// How long nothing may come.
const IDLE: Duration = Duration::from_secs(120);

/// How much is decompressed at once: deflate makes at most about a thousand times as much of it.
const STEP: usize = 1024;

/// The most of a body that is not compressed that is one piece.
const PIECE: usize = 256 << 10;

/// The pieces of a body, decompressed.
pub(super) struct Pieces {
    body: BodyDataStream,
    /// What has come and was not decompressed yet.
    pending: Bytes,
    gzip: Option<MultiGzDecoder<Vec<u8>>>,
    ended: bool,
}

impl Pieces {
    /// Those of `body`, as `headers` say that it is compressed.
    pub(super) fn new(headers: &HeaderMap, body: Body) -> Result<Self, Error> {
        let encoding = headers.get(CONTENT_ENCODING).map(|value| value.as_bytes());
        let gzip = match encoding.map(<[u8]>::to_ascii_lowercase).as_deref() {
            None | Some(b"" | b"identity") => None,
            Some(b"gzip") => Some(MultiGzDecoder::new(Vec::new())),
            Some(other) => {
                return Err(Error::Invalid(format!(
                    "Content-Encoding {:?} is not understood; gzip and identity are",
                    String::from_utf8_lossy(other)
                )));
            }
        };
        Ok(Self {
            body: body.into_data_stream(),
            pending: Bytes::new(),
            gzip,
            ended: false,
        })
    }

    /// The next piece, which may be empty; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        let Some(gzip) = &mut self.gzip else {
            if self.pending.is_empty() {
                match more(&mut self.body).await? {
                    Some(bytes) => self.pending = bytes,
                    None => return Ok(None),
                }
            }
            return Ok(Some(self.pending.split_to(self.pending.len().min(PIECE))));
        };
        if self.pending.is_empty() && !self.ended {
            match more(&mut self.body).await? {
                Some(bytes) => self.pending = bytes,
                None => {
                    self.ended = true;
                    gzip.try_finish().map_err(broken)?;
                    return Ok(Some(std::mem::take(gzip.get_mut()).into()));
                }
            }
        }
        if self.ended {
            return Ok(None);
        }
        let step = self.pending.split_to(self.pending.len().min(STEP));
        gzip.write_all(&step).map_err(broken)?;
        Ok(Some(std::mem::take(gzip.get_mut()).into()))
    }

    /// The same as a stream for a parser of forms, which takes all that is ready and keeps what it has not understood: a piece a poll, and no
    /// more than `ahead` allows.
    pub(super) fn into_stream(self, ahead: Ahead) -> impl Stream<Item = Result<Bytes, Error>> + Send + 'static {
        stream::unfold(Some(self), move |pieces| {
            let ahead = ahead.clone();
            async move {
                let mut pieces = pieces?;
                // The parser gives what it has to whoever waits for it before it comes for more.
                tokio::task::yield_now().await;
                let next = pieces.next().await.and_then(|next| match next {
                    Some(bytes) => ahead.take(bytes.len()).map(|()| Some(bytes)),
                    None => Ok(None),
                });
                match next {
                    Ok(Some(bytes)) => Some((Ok(bytes), Some(pieces))),
                    Ok(None) => None,
                    Err(error) => Some((Err(error), None)),
                }
            }
        })
    }
}

/// How much a parser of forms has taken since it last gave something of it on.
#[derive(Clone, Debug, Default)]
pub(super) struct Ahead(Arc<AtomicUsize>);

impl Ahead {
    /// The most. Headers of a form's part and its boundary are far shorter.
    const MOST: usize = 4 << 20;

    fn take(&self, bytes: usize) -> Result<(), Error> {
        match self.0.fetch_add(bytes, Ordering::SeqCst).saturating_add(bytes) > Self::MOST {
            true => Err(Error::Body(format!(
                "the form cannot be read: no boundary or end of a header within {} bytes",
                Self::MOST
            ))),
            false => Ok(()),
        }
    }

    /// It has given something on.
    pub(super) fn given(&self) {
        self.0.store(0, Ordering::SeqCst);
    }
}

fn broken(error: std::io::Error) -> Error {
    Error::Body(format!("it is no whole gzip stream: {error}"))
}

async fn more(body: &mut BodyDataStream) -> Result<Option<Bytes>, Error> {
    let next = tokio::time::timeout(IDLE, body.next());
    let next = next.await.map_err(|_| Error::Stalled(IDLE))?;
    next.transpose().map_err(|error| Error::Body(error.to_string()))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    async fn read(encoding: &'static str, chunks: Vec<Vec<u8>>) -> Result<Vec<u8>, Error> {
        let headers = HeaderMap::from_iter([(CONTENT_ENCODING, HeaderValue::from_static(encoding))]);
        let chunks = chunks.into_iter().map(Ok::<_, std::io::Error>);
        let mut pieces = Pieces::new(&headers, Body::from_stream(stream::iter(chunks)))?;
        let mut all = Vec::new();
        while let Some(piece) = pieces.next().await? {
            // What is held at once stays small, whatever was sent.
            assert!(piece.len() <= 2 * 1024 * 1024, "{}", piece.len());
            all.extend_from_slice(&piece);
        }
        Ok(all)
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[tokio::test]
    async fn bodies_come_through_whole() {
        let text: Vec<u8> = (0..100_000_u32).flat_map(u32::to_le_bytes).collect();
        assert_eq!(read("identity", vec![text.clone(), Vec::new()]).await.unwrap(), text);
        let packed = gzip(&text);
        for size in [7, 4000, packed.len()] {
            let chunks = packed.chunks(size).map(<[u8]>::to_vec).collect();
            assert_eq!(read("GZIP", chunks).await.unwrap(), text, "{size}");
        }
        // Two streams, one behind the other, are one.
        let both = [gzip(b"ab"), gzip(b"cd")].concat();
        assert_eq!(read("gzip", vec![both]).await.unwrap(), b"abcd");
    }

    #[tokio::test]
    async fn what_grows_beyond_measure_is_held_in_pieces() {
        let size = 64 * 1024 * 1024;
        assert_eq!(read("gzip", vec![gzip(&vec![0; size])]).await.unwrap().len(), size);
    }

    #[tokio::test]
    async fn what_is_broken_is_an_error() {
        let packed = gzip(b"hello");
        let cut = packed[..packed.len() - 3].to_vec();
        for chunks in [vec![cut], vec![b"hello, this is no gzip".to_vec()]] {
            assert!(matches!(read("gzip", chunks).await, Err(Error::Body(_))));
        }
        assert_eq!(read("br", vec![]).await.unwrap_err().status().as_u16(), 400);
    }

    #[tokio::test(start_paused = true)]
    async fn who_stops_sending_is_not_waited_for() {
        let silent = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
        let mut pieces = Pieces::new(&HeaderMap::new(), silent).unwrap();
        assert_eq!(pieces.next().await.unwrap_err().status().as_u16(), 408);
    }
}
