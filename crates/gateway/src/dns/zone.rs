//! What is answered of one domain: the name itself and everything below it has the gateway's addresses, and nothing else. Messages are parsed
//! and written by the crate `domain`. Knows no socket.

use std::net::IpAddr;

use domain::base::iana::{Class, Opcode, OptRcode, Rcode, Rtype};
use domain::base::message_builder::{AdditionalBuilder, AnswerBuilder, PushError};
use domain::base::{Message, MessageBuilder, Name, ParsedName, Question, Serial, StaticCompressor, ToName, Ttl};
use domain::rdata::{A, Aaaa, Soa};

use crate::domain_name::Domain;

/// How long others may keep an answer: the gateway may listen elsewhere when it is started again.
const TTL: Ttl = Ttl::from_secs(60);

/// The largest message that is taken over UDP, as is told (DNS flag day 2020).
const UDP: u16 = 1232;

/// Of the authority record, which says nothing here but how long an answer without addresses may be kept.
const SERIAL: Serial = Serial(1);
const REFRESH: Ttl = Ttl::from_secs(3600);
const RETRY: Ttl = Ttl::from_secs(600);
const EXPIRE: Ttl = Ttl::from_secs(86_400);

type Target = StaticCompressor<Vec<u8>>;
type Asked<'a> = Question<ParsedName<&'a [u8]>>;

/// A domain, and where its names lead.
#[derive(Clone, Debug)]
pub struct Zone {
    apex: Name<Vec<u8>>,
    responsible: Name<Vec<u8>>,
    addresses: Vec<IpAddr>,
}

/// It is no name of a domain.
#[derive(Clone, Debug, thiserror::Error)]
#[error("`{0}` is no name that a name server can answer for")]
pub struct NoName(String);

impl Zone {
    /// Of this domain.
    ///
    /// # Errors
    /// It is no name.
    pub fn new(domain: &Domain, addresses: Vec<IpAddr>) -> Result<Self, NoName> {
        let domain = domain.name();
        let parse = |text: &str| Name::vec_from_str(text).map_err(|_| NoName(domain.to_owned()));
        Ok(Self {
            apex: parse(domain)?,
            responsible: parse(&format!("hostmaster.{domain}"))?,
            addresses,
        })
    }

    /// The answer to a message; `None` to what is no question at all.
    pub fn answer(&self, message: &[u8]) -> Option<Vec<u8>> {
        let message = Message::from_octets(message).ok()?;
        if message.header().qr() {
            return None;
        }
        let target = StaticCompressor::new(Vec::with_capacity(512));
        let builder = MessageBuilder::from_target(target).ok()?;
        // Nothing of what is put together here can be too long: it is the question, and records of names in it.
        let written = self.write(builder, &message).ok()?;
        Some(written.finish().into_target())
    }

    fn write(
        &self,
        builder: MessageBuilder<Target>,
        message: &Message<&[u8]>,
    ) -> Result<AdditionalBuilder<Target>, PushError> {
        let question = match message.header().opcode() {
            Opcode::QUERY => message.sole_question().map_err(|_| Rcode::FORMERR),
            _ => Err(Rcode::NOTIMP),
        };
        let question = match question {
            Ok(question) => question,
            Err(code) => {
                // What cannot be parsed is not repeated.
                let mut refusal = builder.answer();
                let header = refusal.header_mut();
                header.set_id(message.header().id());
                header.set_qr(true);
                header.set_opcode(message.header().opcode());
                header.set_rd(message.header().rd());
                header.set_rcode(code);
                return Ok(refusal.additional());
            }
        };
        let version = message.opt().map(|opt| opt.version());
        let is_ours = question.qclass() == Class::IN && question.qname().ends_with(&self.apex);
        let code = match version {
            Some(1..) => OptRcode::BADVERS,
            _ if is_ours => OptRcode::NOERROR,
            _ => OptRcode::REFUSED,
        };
        let mut answer = builder.start_answer(message, code.rcode())?;
        let mut additional = match code == OptRcode::NOERROR {
            true => {
                answer.header_mut().set_aa(true);
                self.records(answer, &question)?
            }
            false => answer.additional(),
        };
        if version.is_some() {
            additional.opt(|opt| {
                opt.set_udp_payload_size(UDP);
                opt.set_rcode(code);
                Ok(())
            })?;
        }
        Ok(additional)
    }

    /// Addresses of the kind that is asked for, or the record that says that there are none.
    fn records(
        &self,
        mut answer: AnswerBuilder<Target>,
        question: &Asked<'_>,
    ) -> Result<AdditionalBuilder<Target>, PushError> {
        let (name, kind) = (question.qname(), question.qtype());
        for address in &self.addresses {
            match address {
                IpAddr::V4(address) if matches!(kind, Rtype::A | Rtype::ANY) => {
                    answer.push((name, Class::IN, TTL, A::new(*address)))?;
                }
                IpAddr::V6(address) if matches!(kind, Rtype::AAAA | Rtype::ANY) => {
                    answer.push((name, Class::IN, TTL, Aaaa::new(*address)))?;
                }
                _ => (),
            }
        }
        let authority = (&self.apex, Class::IN, TTL, self.authority());
        if kind == Rtype::SOA && name.name_eq(&self.apex) {
            answer.push(authority)?;
            return Ok(answer.additional());
        }
        let is_empty = answer.counts().ancount() == 0;
        let mut rest = answer.authority();
        if is_empty {
            rest.push(authority)?;
        }
        Ok(rest.additional())
    }

    fn authority(&self) -> Soa<&Name<Vec<u8>>> {
        Soa::new(&self.apex, &self.responsible, SERIAL, REFRESH, RETRY, EXPIRE, TTL)
    }
}
