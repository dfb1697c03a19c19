//! Streams: from the server, whose messages come from [`Events`], with signs of life in between and an end at the deadline; and from the
//! client, whose messages are taken one after the other. What is behind an answer goes away with it. Knows no service.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until};

use super::call::{self, Call};
use super::envelope::{self, Envelopes};
use super::json;
use crate::error::Error;
use crate::memory::Share;

/// How long the one message of a request may take to come.
const REQUEST_LIMIT: Duration = Duration::from_secs(30);

/// Where the messages of a stream come from.
pub(crate) trait Events: Send + 'static {
    /// What they are.
    type Message: Serialize + Send;

    /// The next one; `None` at the end. Nothing is lost if it is not waited for to the end.
    fn next(&mut self) -> impl Future<Output = Result<Option<Self::Message>, Error>> + Send;

    /// The one that says nothing.
    fn keepalive(&self) -> Self::Message;
}

/// Answers a call by a stream, which `begin` begins; it is told how long the client wants to wait for the stream's end.
pub(crate) async fn server_stream<I, E, F>(
    memory: &Share,
    request: Request<Body>,
    begin: impl FnOnce(I, Option<Duration>) -> F + Send,
) -> Response<Body>
where
    I: DeserializeOwned + Default,
    E: Events,
    F: Future<Output = Result<E, Error>> + Send,
{
    let (call, body) = match call::stream(request) {
        Ok(parts) => parts,
        Err(error) => return call::refuse_stream(&error),
    };
    let begun = call.within(async {
        let mut messages = Envelopes::new(body, Some(REQUEST_LIMIT), memory);
        let first = messages.next().await?;
        let Some(message) = first else {
            return Err(Error::Invalid(
                "a request of this kind has one message, and none came".to_owned(),
            ));
        };
        if messages.next().await?.is_some() {
            return Err(Error::Invalid("a request of this kind has only one message".to_owned()));
        }
        begin(json::read(&message.bytes)?, call.deadline.map(|(_, limit)| limit)).await
    });
    match begun.await {
        Ok(events) => answer(&call, events),
        Err(error) => call::refuse_stream(&error),
    }
}

/// Answers a stream of the client's by one message, which `take` makes of it.
pub(crate) async fn client_stream<O, F>(
    memory: &Share,
    request: Request<Body>,
    idle: Duration,
    take: impl FnOnce(Envelopes) -> F + Send,
) -> Response<Body>
where
    O: Serialize,
    F: Future<Output = Result<O, Error>> + Send,
{
    let (call, body) = match call::stream(request) {
        Ok(parts) => parts,
        Err(error) => return call::refuse_stream(&error),
    };
    let taken = call.within(take(Envelopes::new(body, Some(idle), memory))).await;
    match taken.and_then(|message| envelope::message(&message)) {
        Ok(message) => {
            let both = [Ok::<Bytes, Infallible>(message), Ok(envelope::end(None))];
            call::streaming(Body::from_stream(stream::iter(both)))
        }
        Err(error) => call::refuse_stream(&error),
    }
}

/// A stream that is being sent.
struct Sending<E> {
    events: E,
    deadline: Option<(Instant, Duration)>,
    ping: Duration,
    quiet_since: Instant,
}

fn answer<E: Events>(call: &Call, events: E) -> Response<Body> {
    let sending = Sending {
        events,
        deadline: call.deadline,
        ping: call.ping_interval(),
        quiet_since: Instant::now(),
    };
    call::streaming(Body::from_stream(stream::unfold(Some(sending), async |sending| {
        let (bytes, rest) = step(sending?).await;
        Some((bytes, rest))
    })))
}

/// The next bytes, and the stream if they are not its last. Where the sandbox itself is gone, the answer breaks off: then the SDKs look
/// whether the sandbox still runs, which all of them do not where a stream ends by an error.
async fn step<E: Events>(mut sending: Sending<E>) -> (Result<Bytes, Error>, Option<Sending<E>>) {
    let next = tokio::select! {
        // The deadline first: a process that never stops writing must not keep it away.
        biased;
        limit = passed(sending.deadline) => Err(Error::Deadline(limit)),
        next = sending.events.next() => next,
        () = sleep_until(sending.quiet_since + sending.ping) => Ok(Some(sending.events.keepalive())),
    };
    let bytes = match next {
        Ok(Some(message)) => envelope::message(&message),
        Ok(None) => return (Ok(envelope::end(None)), None),
        Err(error) => Err(error),
    };
    match bytes {
        Ok(bytes) => {
            sending.quiet_since = Instant::now();
            (Ok(bytes), Some(sending))
        }
        Err(error @ Error::Lost(_)) => (Err(error), None),
        Err(error) => (Ok(envelope::end(Some(&error))), None),
    }
}

async fn passed(deadline: Option<(Instant, Duration)>) -> Duration {
    match deadline {
        Some((end, limit)) => {
            sleep_until(end).await;
            limit
        }
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use crate::memory::Memory;

    /// Numbers, one each second.
    struct Ticks(u32);

    impl Events for Ticks {
        type Message = String;

        async fn next(&mut self) -> Result<Option<String>, Error> {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.0 -= 1;
            Ok((self.0 > 0).then(|| self.0.to_string()))
        }

        fn keepalive(&self) -> String {
            "alive".to_owned()
        }
    }

    async fn ask(headers: &[(&'static str, &'static str)], body: Vec<u8>, ticks: Ticks) -> Vec<(u8, String)> {
        let mut request = Request::post("/").body(Body::from(body)).unwrap();
        for (name, value) in [("content-type", "application/connect+json")].iter().chain(headers) {
            request
                .headers_mut()
                .insert(*name, http::HeaderValue::from_static(value));
        }
        let response = server_stream(&Memory::default().share(), request, async |(): (), _| Ok(ticks)).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "application/connect+json");
        let bytes = response.into_body().collect().await.unwrap().to_bytes();
        let (mut rest, mut messages) = (&bytes[..], Vec::new());
        while let Some((&[flags, _, _, high, low], tail)) = rest.split_first_chunk() {
            let (message, tail) = tail.split_at(usize::from(high) * 256 + usize::from(low));
            messages.push((flags, String::from_utf8(message.to_vec()).unwrap()));
            rest = tail;
        }
        assert!(rest.is_empty());
        messages
    }

    /// One message, `null`.
    fn null() -> Vec<u8> {
        [&[0, 0, 0, 0, 4][..], b"null"].concat()
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_ends_with_its_last_message() {
        let got = ask(&[], null(), Ticks(3)).await;
        let expected = [(0, "\"2\""), (0, "\"1\""), (2, "{}")];
        assert_eq!(got, expected.map(|(flags, text)| (flags, text.to_owned())));
    }

    #[tokio::test(start_paused = true)]
    async fn the_deadline_ends_a_stream_in_its_midst() {
        let got = ask(&[("connect-timeout-ms", "1500")], null(), Ticks(1000)).await;
        assert_eq!(got.len(), 2);
        assert_eq!(got[1].0, 2);
        assert!(
            got[1].1.starts_with(r#"{"error":{"code":"deadline_exceeded""#),
            "{got:?}"
        );
    }

    /// Says nothing, ever.
    struct Silent;

    impl Events for Silent {
        type Message = &'static str;

        async fn next(&mut self) -> Result<Option<&'static str>, Error> {
            std::future::pending().await
        }

        fn keepalive(&self) -> &'static str {
            "alive"
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_quiet_stream_says_that_it_is_there() {
        let mut request = Request::post("/").body(Body::from(null())).unwrap();
        for (name, value) in [
            ("content-type", "application/connect+json"),
            ("keepalive-ping-interval", "50"),
        ] {
            request
                .headers_mut()
                .insert(name, http::HeaderValue::from_static(value));
        }
        let begun = Instant::now();
        let mut body = server_stream(&Memory::default().share(), request, async |(): (), _| Ok(Silent))
            .await
            .into_body();
        for n in 1..4 {
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(frame, &b"\0\0\0\0\x07\"alive\""[..]);
            assert_eq!(begun.elapsed().as_secs(), 50 * n);
        }
    }

    /// Has lost its sandbox.
    struct Broken;

    impl Events for Broken {
        type Message = ();

        async fn next(&mut self) -> Result<Option<()>, Error> {
            Err(Error::Lost("gone".to_owned()))
        }

        fn keepalive(&self) {}
    }

    #[tokio::test]
    async fn an_answer_breaks_off_with_its_sandbox() {
        let mut request = Request::post("/").body(Body::from(null())).unwrap();
        let media = http::HeaderValue::from_static("application/connect+json");
        request.headers_mut().insert("content-type", media);
        let response = server_stream(&Memory::default().share(), request, async |(): (), _| Ok(Broken)).await;
        assert!(response.into_body().collect().await.is_err());
    }

    #[tokio::test]
    async fn a_stream_begins_with_one_message_and_no_more() {
        for body in [Vec::new(), [null(), null()].concat()] {
            let got = ask(&[], body, Ticks(2)).await;
            assert_eq!(got.len(), 1);
            assert!(got[0].1.contains("invalid_argument"), "{got:?}");
        }
    }
}
