import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Collectors;

/**
 * Java's own HTTP client with its defaults, as Spring AI and LangChain4j use it: every call over
 * clear text asks to upgrade to h2c. Needs Java 17 and nothing else: java Client.java
 *
 * Writes a JSON line for each feature, as the programs in other languages do.
 */
public class Client {
    private static final String URL = System.getenv("TANDEM_CLIENTS_URL");
    private static final String KEY = System.getenv("TANDEM_CLIENTS_KEY");
    private static final String ASKED =
            "{\"model\": \"smol\", \"temperature\": 0, \"max_tokens\": 24, %s\"messages\": ["
                    + "{\"role\": \"user\", \"content\": \"Which city is the capital of France?\"}]}";
    private static final Pattern CONTENT =
            Pattern.compile("\"content\": ?\"((?:\\\\.|[^\"\\\\])*)\"");
    private static final HttpClient CLIENT = HttpClient.newHttpClient();

    public static void main(String[] args) throws Exception {
        var whole = CLIENT.send(request(""), BodyHandlers.ofString());
        check(whole.statusCode() == 200, whole.body());
        tell("chat", content(whole.body()), whole.version());

        var streamed = CLIENT.send(request("\"stream\": true, "), BodyHandlers.ofLines());
        check(streamed.statusCode() == 200, "status " + streamed.statusCode());
        var lines = streamed.body().filter(line -> line.startsWith("data: ")).toList();
        check(lines.get(lines.size() - 1).equals("data: [DONE]"), "the stream has no end");
        tell("stream", lines.stream().map(Client::content).collect(Collectors.joining()),
                streamed.version());

        var models = HttpRequest.newBuilder(URI.create(URL + "/v1/models"))
                .header("Authorization", "Bearer " + KEY).build();
        check(CLIENT.send(models, BodyHandlers.ofString()).statusCode() == 200, "no models");
    }

    private static HttpRequest request(String more) {
        return HttpRequest.newBuilder(URI.create(URL + "/v1/chat/completions"))
                .header("Authorization", "Bearer " + KEY)
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(String.format(ASKED, more)))
                .build();
    }

    /** The text of an answer or a chunk, escaped as it came. */
    private static String content(String json) {
        Matcher found = CONTENT.matcher(json);
        return found.find() ? found.group(1) : "";
    }

    private static void tell(String feature, String text, HttpClient.Version version) {
        System.out.printf("{\"feature\": \"%s\", \"text\": \"%s\", \"version\": \"%s\"}%n",
                feature, text, version);
    }

    private static void check(boolean isRight, String words) {
        if (!isRight) {
            throw new AssertionError(words);
        }
    }
}
