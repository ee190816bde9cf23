//! Connections that were closed, and of which the kernel keeps the ports for a minute (`TCP_TIMEWAIT_LEN`). Nobody can
//! listen there meanwhile who does not share the port.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use procfs::net::TcpState;
use procfs::process::Process;
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// How long the kernel may take for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// `SOCK_DESTROY` of linux/sock_diag.h, `NLM_F_REQUEST | NLM_F_ACK` of linux/netlink.h, and the number of TCP.
const DESTROY: u16 = 21;
const ACKNOWLEDGE: u16 = 5;
const TCP: u8 = 6;
/// Bytes of `struct nlmsghdr`, and of that with `struct inet_diag_req_v2`.
const HEADER: usize = 16;
const REQUEST: u32 = 72;

/// Those of the calling thread's network namespace, which need not be that of its process: both of their ends.
fn all() -> impl Iterator<Item = (SocketAddr, SocketAddr)> {
    let own = rustix::thread::gettid().as_raw_nonzero();
    let own = Process::new_with_root(format!("/proc/self/task/{own}").into()).ok();
    let read = |own: Process| [own.tcp(), own.tcp6()].into_iter().flatten().flatten();
    let rows = own.into_iter().flat_map(read);
    rows.filter(|row| row.state == TcpState::TimeWait)
        .map(|row| (row.local_address, row.remote_address))
}

/// Whether the kernel keeps the port of any, in the calling thread's network namespace.
pub fn any_is_kept() -> bool {
    all().next().is_some()
}

/// Has the kernel forget those whose other end is on this host too, in the calling thread's network namespace. Their ports are kept so
/// that no late packet of the old connection is taken for one of a new, and within a host there are no late ones. Gives
/// how many it has forgotten.
///
/// # Errors
/// The kernel cannot do that, or this user may not ask for it (CAP_NET_ADMIN).
pub fn forget() -> io::Result<usize> {
    let (flags, kind) = (SocketFlags::CLOEXEC, SocketType::RAW);
    let protocol = Some(netlink::SOCK_DIAG);
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, kind, flags, protocol)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
    let mut forgotten = 0;
    for (local, remote) in all().filter(|(local, remote)| is_within_host(*local, *remote)) {
        rustix::net::send(&socket, &request(local, remote), SendFlags::empty())?;
        let mut answer = [0; 256];
        let receive = || rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty());
        rustix::io::retry_on_intr(receive)?;
        let code = answer[HEADER..].first_chunk().map_or(0, |code| -i32::from_ne_bytes(*code));
        match code {
            0 => forgotten += 1,
            // It is gone by itself.
            code if code == Errno::NOENT.raw_os_error() => {}
            code => return Err(io::Error::from_raw_os_error(code)),
        }
    }
    Ok(forgotten)
}

fn is_within_host(local: SocketAddr, remote: SocketAddr) -> bool {
    local.ip() == remote.ip()
        || (local.ip().to_canonical().is_loopback() && remote.ip().to_canonical().is_loopback())
}

/// A request to forget this connection.
fn request(local: SocketAddr, remote: SocketAddr) -> Vec<u8> {
    let family = if local.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    // struct nlmsghdr: length, kind, flags, number, sender.
    let mut request = REQUEST.to_ne_bytes().to_vec();
    request.extend([DESTROY, ACKNOWLEDGE].iter().flat_map(|half| half.to_ne_bytes()));
    request.extend([0; 8]);
    // struct inet_diag_req_v2: family, protocol, what to show, padding, states.
    request.extend([family.as_raw() as u8, TCP, 0, 0]);
    request.extend(u32::MAX.to_ne_bytes());
    // struct inet_diag_sockid: ports, addresses, interface, and a cookie that fits every socket.
    request.extend([local.port(), remote.port()].iter().flat_map(|port| port.to_be_bytes()));
    for address in [local.ip(), remote.ip()] {
        let mut bytes = [0; 16];
        match address {
            IpAddr::V4(address) => bytes[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => bytes = address.octets(),
        }
        request.extend(bytes);
    }
    request.extend([0, u32::MAX, u32::MAX].iter().flat_map(|word| word.to_ne_bytes()));
    request
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_port_of_a_closed_connection_is_free_when_it_is_forgotten() {
        if !rustix::process::geteuid().is_root() {
            return crate::skip::skip("connections are forgotten for root");
        }
        for address in ["127.0.0.1:0", "[::1]:0"] {
            // A host may have no IPv6.
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let address = listener.local_addr().unwrap();
            let mut client = TcpStream::connect(address).unwrap();
            let (accepted, _) = listener.accept().unwrap();
            // Who closes first keeps it.
            drop((accepted, listener));
            client.read_exact(&mut [0]).unwrap_err();
            drop(client);
            let is_kept = || all().any(|(local, _)| local == address);
            assert!(is_kept(), "{address}");
            let forgotten = forget().unwrap();
            assert!(forgotten > 0 && !is_kept(), "{address}");
        }
    }
}
