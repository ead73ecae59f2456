import com.sun.net.httpserver.HttpServer;
import java.io.*;
import java.net.*;
import java.nio.ByteBuffer;
import java.nio.channels.*;
import java.util.*;
import java.util.concurrent.*;

/** Servers as Java programs have them: a selector loop, a thread for each connection, HTTP. Prints their ports. */
public class NetServer {
    public static void main(String[] args) throws Exception {
        int loop = selector(), threads = threads(), http = http();
        System.out.println("ports " + loop + " " + threads + " " + http);
    }

    private static int selector() throws IOException {
        ServerSocketChannel listener = ServerSocketChannel.open().bind(new InetSocketAddress("127.0.0.1", 0));
        listener.configureBlocking(false);
        Selector selector = Selector.open();
        listener.register(selector, SelectionKey.OP_ACCEPT);
        start(() -> {
            while (true) {
                selector.select(key -> {
                    try {
                        if (key.isAcceptable()) {
                            SocketChannel channel = listener.accept();
                            channel.configureBlocking(false);
                            channel.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(50_000));
                        } else {
                            echo(key);
                        }
                    } catch (IOException e) {
                        key.cancel();
                    }
                });
            }
        });
        return listener.socket().getLocalPort();
    }

    private static void echo(SelectionKey key) throws IOException {
        SocketChannel channel = (SocketChannel) key.channel();
        ByteBuffer buffer = (ByteBuffer) key.attachment();
        if (key.isReadable() && channel.read(buffer) < 0 && buffer.position() == 0) {
            channel.close();
            return;
        }
        buffer.flip();
        channel.write(buffer);
        buffer.compact();
        key.interestOps((buffer.position() > 0 ? SelectionKey.OP_WRITE : 0)
            | (buffer.hasRemaining() ? SelectionKey.OP_READ : 0));
    }

    /** Each thread starts a program while its connection is open, which inherits it for a moment. */
    private static int threads() throws IOException {
        ServerSocket listener = new ServerSocket(0, 50, InetAddress.getByName("127.0.0.1"));
        start(() -> {
            while (true) {
                Socket socket = listener.accept();
                start(() -> {
                    try (socket) {
                        DataInputStream in = new DataInputStream(new BufferedInputStream(socket.getInputStream()));
                        DataOutputStream out = new DataOutputStream(new BufferedOutputStream(socket.getOutputStream()));
                        while (true) {
                            int length = in.readInt();
                            if (length < 0) {
                                Process child = new ProcessBuilder("/bin/echo", "child " + length).start();
                                byte[] said = child.getInputStream().readAllBytes();
                                child.waitFor();
                                out.writeInt(said.length);
                                out.write(said);
                            } else {
                                out.writeInt(length);
                                out.write(in.readNBytes(length));
                            }
                            out.flush();
                        }
                    } catch (EOFException e) {
                        // The client has gone.
                    }
                    return null;
                });
            }
        });
        return listener.getLocalPort();
    }

    private static int http() throws IOException {
        HttpServer server = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 50);
        server.createContext("/", exchange -> {
            byte[] body = exchange.getRequestBody().readAllBytes();
            exchange.sendResponseHeaders(200, body.length == 0 ? -1 : body.length);
            try (OutputStream out = exchange.getResponseBody()) {
                out.write(body);
            }
        });
        server.setExecutor(Executors.newFixedThreadPool(4));
        server.start();
        return server.getAddress().getPort();
    }

    private static void start(Callable<?> body) {
        Thread thread = new Thread(() -> {
            try {
                body.call();
            } catch (Exception e) {
                e.printStackTrace();
                System.exit(1);
            }
        });
        thread.start();
    }
}
